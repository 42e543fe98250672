"""Flags, and what is set where nobody gives one: threads and the ranks' share of the CPUs."""

import argparse
import gc
import os
import re
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from generated import ROOT, TASKS, TEMPLATE_FOLDER, both_tasks, refusal
from ranks import on_ranks

from ddpkit.ranks import cpus, process, protocol
from ddpkit.run import flags, starting
from ddpkit.run import settings as machine
from ddpkit.vision import predicting


@pytest.mark.parametrize(
    ("low", "kind", "text", "value"),
    [
        (0, int, "0", 0),
        (1, int, "7", 7),
        (0, float, "1e-3", 0.001),
        (0.5, float, "0.5", 0.5),
        (1, int, "0", None),
        (1, int, "-1", None),
        (1, int, "1.5", None),
        (1, int, "x", None),
        (0, float, "nan", None),
        (0, float, "inf", None),
        (0, float, "-1e-9", None),
        (0, float, "x", None),
    ],
)
def test_numbers(low, kind, text, value):
    if value is None:
        with pytest.raises(ArgumentTypeError, match=text):
            flags.Parser.at_least(low, kind)(text)
    else:
        found = flags.Parser.at_least(low, kind)(text)
        assert found == value
        assert type(found) is kind


def test_numbers_up_to_a_limit() -> None:
    share = flags.Parser.at_least(0.01, float, most=1)
    assert share("1") == 1
    assert share("0.01") == 0.01
    for text in "1.001", "0.009", "nan", "inf":
        with pytest.raises(ArgumentTypeError, match=f"{text} .* at most 1"):
            share(text)


@pytest.mark.parametrize(
    "words",
    [
        "--epochs 0",
        "--epochs two",
        "--epoch 3",
        "--epochs",
        "-1000,3000",
        "--name -x",
        "--debug-rank 0:0",
        "--debug-rank 0:65536",
        "--debug-rank 0:host",
        "--debug-rank one",
        "--debug-rank -1",
        "--debug-rank 0,",
        "--debug-rank 1;2",
    ],
)
def test_mistakes(words):
    parser = flags.Parser(prog="main.py")
    parser.add_argument("--epochs", type=flags.Parser.at_least(1))
    parser.add_argument("--name")
    parser.add_argument("--debug-rank", type=parser.ranks)
    with refusal("flags.error", "main.py --help"):
        parser.parse_args(words.split())
    assert flags.Parser.ranks("3,0,3:70") == ([0, 3], 70)
    for fold in "2", "0/5", "6/5", "1/1", "a/b":
        with pytest.raises(ArgumentTypeError, match=fold):
            flags.Parser.fold(fold)
    assert flags.Parser.fold("2/5") == flags.Parser.fold("2,5") == (2, 5)


OTHER_WORDS = {
    "classification": {
        "--epoch 5": "--epoch: no such flag; did you mean --epochs? (",
        "--eval-onyl": "--eval-onyl: no such flag; did you mean --eval-only? (",
        "--batch_size=8": "--batch_size: no such flag; did you mean --batch-size? (",
        "--epoch 5 --label-smoothin 1": "did you mean --epochs?; --label-smoothin: no such "
        "flag; did you mean --label-smoothing? (",
        "--qwxz": "--qwxz: no such flag (",
        "epochs=5": "epochs: no such flag; did you mean --epochs? (",
        "5": "5: a value without its flag, as in --epochs 5 (",
        "-epochs 5": "-epochs: no such flag; did you mean --epochs? (",
        "--lr 0,001": "0,001 is not a number of 0 or more (",
        "--resume": "--resume: expected one argument (",
        "recipes": "recipes: a value without its flag, as in --data recipes (",
        "--json": "--json needs --eval-only (",
    },
    "segmentation": {
        "--encodr vgg11": "did you mean --encoder? (",
        "--json": "--json needs --eval-only (",
    },
}


@both_tasks
def test_flags_that_do_not_exist(project):
    """The one that was meant is named, or what it needs."""

    def check() -> None:
        from flags import parse_args

        for words, line in OTHER_WORDS[project.task].items():
            with refusal("flags.error", line):
                parse_args(words.split())
        Path("conf.yaml").write_text("epochs: 5\nlr: 0.1\n")
        with refusal("flags.error", "epochs: no such flag; did you mean --epochs?"):
            parse_args(["@conf.yaml"])
        with refusal("flags.read_args_from_files", "recipes/no.txt: no such file"):
            parse_args(["@recipes/no.txt"])

    project.here(check).ok()


@both_tasks
def test_a_checkpoint_of_the_other_task(project, trained, tmp_path):
    """Its flags tell; a flag of the other task in a project of one's own does not."""
    file = tmp_path / "other.pt"

    def check() -> None:
        import torch

        from ddpkit.vision.predicting import OF_TASKS, open_model
        from flags import parse_args
        from model import build_model

        def opened() -> None:
            open_model(file, build_model, parse_args, torch.device("cpu"))

        (other,) = OF_TASKS.keys() - {project.task}
        names = OF_TASKS[other].split()
        state = torch.load(trained / "last.pt", weights_only=True)
        added = dict.fromkeys(names[1:])  # flags of one's own, later given up
        torch.save({**state, "args": state["args"] | added}, file)
        opened()
        state["args"] = dict.fromkeys(names)
        torch.save(state, file)
        with refusal("predicting.open_model", file, f"from a {other} project"):
            opened()

    project.here(check).ok()


def test_flags_of_the_tasks():
    """Those that one task alone has are known as such."""
    own = {}
    for task in TASKS:
        text = (ROOT / TEMPLATE_FOLDER / "tasks" / task / "flags.py").read_text()
        own[task] = set(re.findall(r'add_argument\("(--[a-z-]+)"', text))
    one, two = own.values()
    found = {
        task: {f"--{name.replace('_', '-')}" for name in names.split()}
        for task, names in predicting.OF_TASKS.items()
    }
    assert found == dict(zip(TASKS, (one - two, two - one), strict=True))


@both_tasks
def test_the_number_of_a_rank_on_its_node(project):
    """As launchers tell it, by LOCAL_RANK or a flag; it makes no other run of one that resumes."""

    def check() -> None:
        from ddpkit.run import checkpoint
        from flags import parse_args

        os.environ.pop("LOCAL_RANK", None)
        before = parse_args([])
        assert before.local_rank == 0
        assert parse_args(["--local-rank", "3"]).local_rank == 3
        assert parse_args(["--local_rank=3"]).local_rank == 3
        os.environ["LOCAL_RANK"] = "1"
        words = ["--debug", "1", "--dist-timeout", "9"]
        now = parse_args(words, vars(before) | {"local_rank": 1})
        assert (now.local_rank, now.debug) == (1, ([1], 5678))
        then = checkpoint.to_plain(vars(before))
        for name in flags.OF_A_START:  # as `checkpoint.read` leaves them out
            then.pop(name)
        assert checkpoint.changes(then, vars(now)) == ""
        os.environ["LOCAL_RANK"] = "x"
        with refusal("flags.error", "--local_rank: x is not an integer"):
            parse_args([])

    project.here(check).ok()


def test_a_parser_of_argparse(capsys, monkeypatch):
    """All that argparse knows of it is taken over, such as groups, positions and defaults."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    plain = argparse.ArgumentParser("my.py", description="What it does.", epilog="End.")
    plain.add_argument("inputs", nargs="+", metavar="FILE")
    group = plain.add_argument_group("mine")
    group.add_argument("--size", type=int, default=3, help="in pixels")
    either = plain.add_mutually_exclusive_group()
    either.add_argument("--one", action="store_true")
    either.add_argument("--two", action="store_true")
    plain.set_defaults(own=7)
    parser = flags.Parser(plain)
    found = parser.parse_args(["-1,2", "a.png", "--two", "--size=5"])
    assert vars(found) == vars(plain.parse_args(["a.png", "--two", "--size=5"])) | {
        "inputs": ["-1,2", "a.png"]
    }
    for words, line in (
        ("a.png --sise 3", "--sise: no such flag; did you mean --size? (my.py --help"),
        ("a.png --one --two", "not allowed with argument --one"),
        ("--one", "required: FILE"),
    ):
        with refusal("flags.error", line):
            parser.parse_args(words.split())
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    said = capsys.readouterr().out
    parts = "my.py", "What it does.", "mine:\n", "in pixels (default: 3)", "End."
    assert all(part in said for part in parts), said
    monkeypatch.setenv("LOCAL_RANK", "1")  # whose help another rank prints
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert not capsys.readouterr().out


def test_lines_of_a_file(tmp_path):
    file = tmp_path / "flags"
    parser = flags.Parser()
    parser.add_argument("--a", default=3, help="number")
    parser.add_argument("--b", type=int, help="none")
    parser.add_argument("--c", help="none")
    file.write_text("# it's mine\n--a 'x#1' --b 2  # two, it's \"#2\"\n--c d#e\n\n")
    assert vars(parser.parse_args([f"@{file}"])) == {"a": "x#1", "b": 2, "c": "d#e"}
    file.write_text("--a -1000,3000 --c -.5,-1e-3,2 # CT\n--b -4\n")
    assert vars(parser.parse_args([f"@{file}"])) == {
        "a": "-1000,3000",
        "b": -4,
        "c": "-.5,-1e-3,2",
    }
    file.write_text("--a it's\n")
    with refusal("flags.error", "it's"):
        parser.parse_args([f"@{file}"])
    assert (
        parser.format_help().count("default")
        == parser.format_help().count("(default: 3)")
        == 1
    )


def test_the_home_folder(tmp_path, monkeypatch):
    """As a shell would have it, where it does not: after = and in a file; also own flags."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = flags.Parser()
    parser.add_argument("inputs", nargs="*")
    for name, kind in (
        ("--data", Path),
        ("--own", Path),
        ("--resume", None),
        ("--text", str),
    ):
        parser.add_argument_group().add_argument(name, type=kind)
    (tmp_path / "more").write_text("--resume=~/last.pt --text '~/b~c'\n")
    found = parser.parse_args(
        ["--data=~/set", "--own", "~", "@~/more", "~/image", "a~/b", "~a.png"]
    )
    assert vars(found) == {
        **{"data": tmp_path / "set", "own": tmp_path, "resume": f"{tmp_path}/last.pt"},
        **{
            "text": f"{tmp_path}/b~c",
            "inputs": [f"{tmp_path}/image", "a~/b", "~a.png"],
        },
    }


def test_files_of_flags(tmp_path, monkeypatch):
    """Variables have their values; what is no file, or has no end, ends in one line."""
    monkeypatch.setenv("SCRATCH", "/scratch/me too")
    parser = flags.Parser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--text")
    path = tmp_path / "flags"
    other = tmp_path / "other"
    path.write_text(f"--data ${{SCRATCH}}/set\n@{other}")
    other.write_text("--text=$SCRATCH$5$")
    found = parser.parse_args([f"@{path}"])
    assert found.data == Path("/scratch/me too/set")
    assert found.text == "/scratch/me too$5$"
    other.write_text("--text $UNKNOWN/a")
    with refusal("flags.error", "UNKNOWN is not set"):
        parser.parse_args([f"@{path}"])
    other.write_text(f"@{path}")
    with refusal("flags.error", f"@{path} includes itself"):
        parser.parse_args([f"@{path}"])
    other.write_bytes(b"\xff")
    with refusal("files.parse", other, "save it as UTF-8"):
        parser.parse_args([f"@{path}"])
    other.unlink()
    os.mkfifo(other)
    for odd in other, tmp_path, "/dev/zero":
        path.write_text(f"@{odd}")
        with refusal("files.failure", odd, "cannot be read"):
            parser.parse_args([f"@{path}"])


def test_values_of_another_kind():
    """As the checkpoint of a stranger may have them; texts are converted as what is typed."""
    parser = flags.Parser()
    parser.add_argument("--arch", default="a")
    parser.add_argument("--lr", type=parser.at_least(0, float))
    parser.add_argument("--size", type=parser.at_least(1), default=3)
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--tta", action="store_true")
    # of the data, as --several-labels and --crop of a project
    parser.set_defaults(several=False, crop=0.875)
    for name, value in {
        **{"arch": ["a"], "size": {}, "output": (3,), "tta": "yes"},
        **{"several": "yes", "crop": "x"},
    }.items():
        with refusal(
            "flags.error", f"--{name}: the saved value is {value!r}, not one like "
        ):
            parser.set_defaults(**{name: value})
    parser.set_defaults(arch=3, lr=1, size=4, output="there", own=[1], crop=None)
    found = parser.parse_args([])
    assert vars(found) == {
        **{"arch": "3", "lr": 1, "size": 4, "output": Path("there"), "own": [1]},
        **{"tta": False, "several": False, "crop": None},
    }
    for name in "arch", "size", "tta":
        with refusal(
            "flags.error", f"--{name}: the saved value is None, not one like "
        ):
            parser.set_defaults(**{name: None})
    # what a type has made of text, it makes of it again; another's may not
    parser.add_argument("--fold", type=parser.fold)
    parser.add_argument("--class-weights", type=parser.class_weights)
    parser.add_argument("--share", type=lambda text: float(text) / 100)
    parser.add_argument("--sizes", type=int, nargs="+")
    saved = {"fold": (2, 5), "class_weights": [1.0, 2.5], "share": 0.5, "sizes": [1, 2]}
    parser.set_defaults(**saved)
    found = parser.parse_args([])
    assert (found.fold, found.class_weights) == ((2, 5), (1.0, 2.5))
    assert (found.share, found.sizes) == (0.5, [1, 2])
    for name, value in {
        **{"fold": {"a": 1}, "class_weights": [["a"], {}], "lr": [0.1, 0.2]},
        "size": float("nan"),
    }.items():
        argparse.ArgumentParser.set_defaults(parser, **dict.fromkeys(saved))
        parser.set_defaults(**saved, lr=0.1, size=3)
        with refusal("flags.error", f"--{name.replace('_', '-')}: "):
            parser.set_defaults(**{name: value})
            parser.parse_args([])
    argparse.ArgumentParser.set_defaults(parser, **dict.fromkeys(saved))
    parser.set_defaults(**saved, lr=0.1)
    for size, words in ("x", "x is not an integer"), (1e300, "1e+300 is not an"):
        parser.set_defaults(size=size)
        with refusal("flags.error", "--size", words):
            parser.parse_args([])


def test_flags_of_a_checkpoint():
    """Its own count, also for a flag that has to be given; newer ones get their default."""
    parser = flags.Parser()
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--newer", type=int, default=4)
    parser.set_defaults(labels="a", older=0.1)
    found = parser.parse_args([])
    assert vars(found) == {"labels": Path("a"), "newer": 4, "older": 0.1}


def test_cpus(tmp_path, monkeypatch):
    """A container's quota of 8 CPUs, the ranks' shares, and what srun may have dealt out."""
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(cpus, "QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cpus.cpus() == 8
    for limit, count in (
        ("100000", 1),
        ("150000", 2),
        ("50000", 1),
        ("900000", 8),
        ("max", 8),
    ):
        quota.write_text(f"{limit} 100000\n")
        assert cpus.cpus() == count
    quota.unlink()
    for ranks, per_task, share in (
        (1, 0, 8),
        (8, 0, 1),
        (8, 8, 8),
        (3, 1, 2),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", str(per_task))
        assert cpus.cpu_share() == share


def test_threads(monkeypatch):
    """What a person sets counts; the 1 that launch.sh or plain torchrun sets does not."""
    monkeypatch.setattr(machine, "cpu_share", lambda: 8)
    for given, on_gpu, threads in (
        ("", 0, 8),
        ("", 1, 4),
        ("3", 1, 3),
        ("x", 0, 8),
        ("1", 0, 1),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert machine.default_threads(bool(on_gpu)) == threads
    with monkeypatch.context() as by_torchrun:
        by_torchrun.setattr(process, "by_plain_torchrun", lambda: True)
        assert machine.default_threads(False) == 8
    monkeypatch.setenv(protocol.THREADS, "auto")
    assert machine.default_threads(False) == 8


@on_ranks(1, group=False)
def test_garbage_without_start():
    """It is collected, seldom, in a script that only prepares, and as ever after `start`."""
    before = gc.get_threshold()
    starting.before_imports()
    assert gc.isenabled()
    assert gc.get_threshold()[0] > before[0]
    starting.run_main(lambda: None)
    assert gc.isenabled()
    assert gc.get_threshold() == before
