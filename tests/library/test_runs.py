"""Real runs of generated projects: resume, output files, metrics, flags, a tracker."""

import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import Project, both_tasks, in_soak, refusal, rows, wait_for
from PIL import Image

SEGMENTATION = pytest.mark.parametrize("project", ["segmentation"], indirect=True)


@both_tasks
def test_output_files(project: Project, trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    images = {"curves.png", "examples.png", "confusion.png", "worst.png"}
    assert names == images | {
        ".lock",
        "last.pt",
        "best.pt",
        "metrics.csv",
        "args.json",
        "per_class.csv",
        "worst.csv",
        "epochs",
    }
    assert torch.load(trained / "last.pt", weights_only=True)["epoch"] == 1
    args = json.loads((trained / "args.json").read_text())
    assert args["flags"]["epochs"] == 1
    assert args["ranks"] == 2
    assert args["versions"]["torch"] == torch.__version__
    for name in images:
        assert np.asarray(Image.open(trained / name)).std() > 10  # something is drawn


def test_resume(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """Goes on in the folder; --resume never starts over, and leaves what is not the run's."""
    out = shutil.copytree(trained, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    assert "1 of 2 epochs done" in project.train(data, out, "--epochs", 2).ok().out
    assert [row["epoch"] for row in rows(out)] == ["1", "2"]
    assert rows(out)[0] == rows(trained)[0]

    # A mistake found before training begins costs nothing of the former run.
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = project.train(data, out, "--resume", "never", "--arch", "none", on=1)
    done.refused("networks.check_name", "--arch none")
    project.train(data, out, "--arch", "resnet34", on=1).refused(
        *("states.fitting", "last.pt", "the change, such as --arch resnet34 (was"),
        *(f"--weights {out / 'best.pt'} --output-dir", ", ...); "),
    )
    assert before == {
        path: path.read_bytes() for path in out.rglob("*") if path.is_file()
    }

    done = project.train(data, out, "--resume", "never").ok()
    assert "--resume never: removing" in done.out
    assert [row["epoch"] for row in rows(out)] == ["1"]
    assert len(list(out.glob("epochs/events*"))) == 1
    assert (out / "notes.txt").read_text() == "mine"


def test_resume_elsewhere_and_otherwise(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """From a checkpoint of another folder, on one rank, at another rate, by flags from a file."""
    out = tmp_path / "out"
    file = tmp_path / "flags.txt"
    file.write_text(
        "# other\n--lr 0.002 --weight-decay 0.2 --epochs 3\n"
        f"--resume '{trained / 'last.pt'}'\n"
    )
    said = project.train(data, out, f"@{file}", on=1).ok().out
    assert "1 of 3 epochs done" in said
    assert "--lr 0.002 (was 0.001)" in said
    assert json.loads((out / "args.json").read_text())["flags"]["lr"] == 0.002
    _, second, third = rows(out)  # the first is the other folder's
    assert second["epoch"] == "2"
    assert second["step"] == str(6 + 13)
    # Cosine after half an epoch of warm-up: the schedule goes by epochs, not by steps.
    assert float(second["lr"]) == pytest.approx(0.001 * (1 + np.cos(np.pi * 1.5 / 2.5)))
    assert float(third["lr"]) == pytest.approx(0, abs=1e-9)
    best = torch.load(out / "best.pt", weights_only=True)
    assert best["optimizer"]["param_groups"][0]["weight_decay"] == 0.2
    # this folder's own best, though the other's was better
    assert best["epoch"] in (2, 3)
    # The same command once more goes on from what it has reached since.
    said = project.train(data, out, f"@{file}", "--epochs", 4, on=1).ok().out
    assert f"{out / 'last.pt'}: 3 of 4 epochs done" in said
    assert [row["epoch"] for row in rows(out)] == ["1", "2", "3", "4"]


@both_tasks
def test_names_are_refused_before_data_are_read(
    project: Project, tmp_path: Path
) -> None:
    """On all ranks, one line; there are no data, of which the line would be otherwise."""
    missing = tmp_path / "none"
    flags = [
        ("--arch unett resnet8 timm/restnet10t", "networks.check_name"),
        ("--optimizer adammw", "recipe.check_optimizer"),
        ("--augment color,cutmx", "augment.parse_augment"),
        (f"--weights {missing}.pt", "pretrained.load_pretrained"),
        ("--weights IMAGENET0", "pretrained.load_pretrained"),
    ]
    if project.task == "segmentation":
        flags.append(("--encoder resnet19 ResNet34", "networks.check_name"))
        flags.append(("--arch resnet18", "networks.check_name"))
        flags.append(("--loss dise", "losses.init"))
    else:
        flags.append(("--arch fcn_resnet50 raft_small", "networks.check_name"))

    def check() -> None:
        import main
        from flags import parse_args

        for words, code in flags:
            name, *values = words.split()
            for value in values:
                args = parse_args([name, value])
                with refusal(code, f"{name} {value.split(',')[-1]}"):
                    main.check_flags(args, args.weights)
                    main.recipe.check_optimizer(args.optimizer)
        if project.task == "segmentation":  # which smp knows by another name
            args = parse_args(["--encoder", "timm-regnetx_002"])
            main.check_flags(args, args.weights)

    project.here(check).ok()
    done = project.train(missing, tmp_path / "out", "--arch", "unett")
    done.refused("networks.check_name", "--arch unett")
    assert done.statuses == [2, 2]


def test_two_runs_in_one_folder(project: Project, few: Path, tmp_path: Path) -> None:
    """The second is refused; once the first has been killed, it may begin at once."""
    first = project.start(project.flags(few, tmp_path, "--epochs", 999))
    wait_for(lambda: "steps per epoch" in first.said()[0])
    project.train(few, tmp_path, on=1).refused("folder.lock", tmp_path, ".lock")
    first.kill(signal.SIGKILL)
    first.end()
    project.train(few, tmp_path, on=1).ok()


@SEGMENTATION
def test_images_of_different_sizes(
    project: Project, own_data: Path, trained: Path, tmp_path: Path
) -> None:
    """No image is padded for the sake of another, so the batch size does not matter."""
    for n, path in enumerate(sorted((own_data / "val" / "images").iterdir())):
        for each in path, own_data / "val" / "masks" / f"{path.stem}.png":
            image = Image.open(each)
            image.crop((0, 0, 64 - 7 * (n % 3), 40 + 5 * (n % 2))).save(each)
    found = []
    for size, on in (1, 2), (23, 1):
        words = [
            "--eval-only",
            "--json",
            "--resume",
            trained / "best.pt",
            "--batch-size",
            size,
        ]
        done = project.train(own_data, tmp_path, words, on=on).ok()
        found.append(json.loads(done.out.splitlines()[-1]))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_flags_that_cannot_be(project: Project, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = tmp_path / "file"
    file.touch()
    done = project.train(data, out, "--batch-size", 27)
    assert done.statuses == [2, 2]
    done.refused("loading.init", "--batch-size 27", "53 training images", "2 ranks")
    project.train(data, out, "--output-dir", file, on=1).refused("files.failure", file)
    assert not (out / "last.pt").exists()


TRACKER = """
from types import SimpleNamespace

OWN = SimpleNamespace(run_id="a1b2")


def note(*words):
    with open(__file__ + ".txt", "a") as file:
        print(*words, file=file)


def log(row, step=None):
    note(int(row["epoch"]), row["top1"])
    if row["epoch"] == 3:
        raise ConnectionError("no route to host\\nat all")


def init(project, config, resume, id=None, name=None):
    assert resume == "allow" and config["epochs"] in (1, 3)
    note("start", id or name)
    return SimpleNamespace(id="a1b2", name="c3d4", log=log)


def start_run(run_id, run_name):
    note("start", run_id or run_name)
    return SimpleNamespace(info=OWN)


def set_experiment(name):
    assert name == "my_ddp_project"


def log_params(params):
    assert params == {} or params["epochs"] == 1


log_metrics = log
"""


@pytest.mark.parametrize("name", ["mlflow", in_soak("trackio"), in_soak("wandb")])
def test_trackers(project: Project, few: Path, tmp_path: Path, name: str) -> None:
    """A resumed run goes on in the same tracked run; one that fails costs no epoch."""
    (tmp_path / f"{name}.py").write_text(TRACKER)
    out = tmp_path / "out"

    def patch() -> None:
        sys.path.insert(0, str(tmp_path))
        sys.modules.pop(name, None)

    on = 2 if name == "wandb" else 1  # rank 0 alone has one
    for epochs in 1, 3:
        more = ["--epochs", epochs, "--tracker", name]
        done = project.train(few, out, more, patch=patch, on=on).ok()
    assert "did not accept a row (ConnectionError: no route to host at all)" in done.out
    expected = [f"{row['epoch']} {float(row['top1'])}" for row in rows(out)]
    expected.insert(0, "start None" if name == "wandb" else "start out")
    expected.insert(2, "start c3d4" if name == "trackio" else "start a1b2")
    found = (tmp_path / f"{name}.py.txt").read_text().splitlines()
    assert found == expected

    def gone() -> None:
        sys.modules[name] = None

    done = project.train(few, tmp_path / "other", "--tracker", name, patch=gone, on=1)
    done.refused("reporting.check_tracker", f"pip install {name}")


def test_its_own_tests(project: Project, tmp_path: Path) -> None:
    """They pass, with forks for the ranks, because launch.sh would import torch each time."""
    own = project.copy(tmp_path / "copy")

    def launch(ranks: int, *flags: object) -> str:
        # They look at the images of one run, and drawing is half of the time of each.
        draws = "--save-every" in flags
        return own.run("--workers", 1, flags, on=ranks, draws=draws).ok().out

    class Forks:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[0].module.launch = launch

    def act() -> None:
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider"], plugins=[Forks()]))

    done = own.here(act).ok()
    assert " passed" in done.out
    assert "skipped" not in done.out


@SEGMENTATION
def test_its_own_test_finds_a_generator_that_is_not_seeded(
    project: Project, tmp_path: Path
) -> None:
    """One that all samples share, in place of one that is made anew for each."""
    own = project.copy(tmp_path / "copy")
    used = "        pixels, labels = self.transform(*self.open(index))\n"
    flip = (
        f"{used}        pixels = pixels.flip([-1] if SHARED.random() < 0.5 else [])\n"
    )
    text = (own.folder / "dataset.py").read_text()
    assert text.count(used) == 1
    shared = "\nimport random\n\nSHARED = random.Random(0)\n"
    (own.folder / "dataset.py").write_text(text.replace(used, flip) + shared)

    def act() -> None:
        sys.exit(pytest.main(["-q", "-k", "loader_workers", "-p", "no:cacheprovider"]))

    done = own.here(act)
    assert done.status == 1
    assert "AGENTS.md" in done.out
