"""Real runs of generated projects: launchers, ranks, resume, output files, prediction."""

import csv
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, Done, Project, finish, rows, run, small, start
from PIL import Image

# What these tests try is the same file, byte for byte, in both kinds of project.
SAME_FOR_BOTH = pytest.mark.parametrize("project", ["classification"], indirect=True)


def flags(data: Path, out: Path, *more: object) -> list[object]:
    return [*small(data), "--data", data, "--output-dir", out, *more]


def with_bug(project: Project, folder: Path, old: str, new: str) -> Path:
    """A copy of the project's launch.sh whose main.py has `new` where it had `old`, once."""
    copy = project.copy(folder).folder
    text = (copy / "main.py").read_text()
    assert text.count(old) == 1
    (copy / "main.py").write_text(text.replace(old, new))
    return copy / "launch.sh"


@SAME_FOR_BOTH
def test_three_ranks_end_with_the_same_weights(
    project: Project, data: Path, tmp_path: Path
) -> None:
    launcher = [sys.executable, project.folder / "engine/ranks/launcher.py", "--standalone"]
    # 53 pictures are two global batches of 24 and a rest, which is left out.
    more = flags(data, tmp_path, "--accumulate", 2, "--epochs", 2)
    words = ["--nproc-per-node", 3, SCRIPTS / "keep_weights.py", tmp_path, *more]
    done = run([*launcher, *words], PYTHONPATH=str(project.folder)).ok()
    assert "batch 4 per rank x 3 rank(s) x 2 accumulated = 24" in done.out
    assert [row["step"] for row in rows(tmp_path)] == ["2", "4"]
    first, *others = (torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in range(3))
    saved = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
    for other in [*others, saved]:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


@SAME_FOR_BOTH
def test_a_forward_pass_beside_ddp_is_found_out(
    project: Project, data: Path, tmp_path: Path
) -> None:
    right, wrong = "outputs = ddp_model(images)", "outputs = ddp_model.module(images)"
    broken = with_bug(project, tmp_path / "broken", right, wrong)
    done = run([broken, *flags(data, tmp_path / "out")])
    done.refused("differs between ranks", "ddp_model")
    assert not (tmp_path / "out" / "last.pt").exists()


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@SAME_FOR_BOTH
class TestLaunchers:
    """All ways to start main.py."""

    @pytest.mark.parametrize(
        "launcher",
        [
            "-m torch.distributed.run --standalone --nproc-per-node 2",
            "-m torch.distributed.launch --nproc-per-node 2 --master-port {port}",
        ],
    )
    def test_pytorch(self, project: Project, data: Path, tmp_path: Path, launcher: str) -> None:
        words = launcher.format(port=free_port()).split()
        command = [sys.executable, *words, project.folder / "main.py"]
        out = run([*command, *flags(data, tmp_path)]).ok().out
        assert out.startswith("starting 2 rank(s) ...\n2 rank(s) on CPU")
        assert rows(tmp_path)[0]["step"] == "6"

    def test_plain_start_is_a_group_of_one(
        self, project: Project, data: Path, tmp_path: Path
    ) -> None:
        command = [sys.executable, project.folder / "main.py", *flags(data, tmp_path)]
        assert "1 rank(s)" in run(command).ok().out
        assert rows(tmp_path)[0]["step"] == "13"

    @pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
    def test_local_rank_as_a_flag(self, project: Project, flag: str) -> None:
        """In older launchers' spelling, too; one in the environment wins."""
        assert project.call("ranks.local_rank", flag, None) == 1
        assert project.call("ranks.local_rank", flag, "2") == 2

    def test_srun(self, project: Project, data: Path, tmp_path: Path) -> None:
        """Two nodes of one task each, as srun's variables tell of them; no SLURM is run."""
        mark, tools = uuid.uuid4().hex, fake_scontrol(tmp_path)
        command = [
            sys.executable,
            project.folder / "main.py",
            *flags(data, tmp_path / "out"),
        ]
        ranks = [start(command, mark, **tools, **srun_step(r)) for r in range(2)]
        done = [finish(each, mark).ok() for each in ranks]
        assert "2 rank(s)" in done[0].out

    def test_srun_launch_sh(self, project: Project, data: Path, tmp_path: Path) -> None:
        """The same, with launch.sh as the task; its two ranks a node make four."""
        mark, tools = uuid.uuid4().hex, fake_scontrol(tmp_path)
        command = [project.folder / "launch.sh", *flags(data, tmp_path / "out")]
        nodes = [start(command, mark, **tools, **srun_step(r)) for r in range(2)]
        done = [finish(each, mark).ok() for each in nodes]
        assert "4 rank(s)" in done[0].out
        wrong = {**srun_step(0), "SLURM_STEP_NUM_TASKS": "4"}
        run(command, **tools, **wrong).refused("--ntasks-per-node 1")

    def test_two_nodes(self, project: Project, data: Path, tmp_path: Path) -> None:
        """One told by our variables; the other by those that Kubernetes sets for torchrun."""
        mark = uuid.uuid4().hex
        env = {
            "NNODES": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        other = {f"PET_{name}": value for name, value in env.items()}
        other.update(PET_NODE_RANK="1", PET_NPROC_PER_NODE="2", PET_RDZV_BACKEND="c10d", NPROC="")
        command = [project.folder / "launch.sh", *flags(data, tmp_path)]
        nodes = [start(command, mark, NODE_RANK="0", **env), start(command, mark, **other)]
        first, second = (finish(node, mark).ok() for node in nodes)
        assert first.out.startswith("starting 4 rank(s) ...\n4 rank(s) on CPU")
        assert second.out == ""

    def test_names_that_do_not_resolve(self, project: Project) -> None:
        """That of another node is told at once; test_plain.py has what follows."""
        mark = uuid.uuid4().hex
        env = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "nowhere.invalid"}
        process = start([project.folder / "launch.sh"], mark, **env)
        line = process.stderr.readline()
        assert line.startswith("MASTER_ADDR=nowhere.invalid cannot be resolved (")
        process.kill()
        assert not finish(process, mark).left

    def test_from_another_folder(self, project: Project, data: Path, tmp_path: Path) -> None:
        """Paths on the command line are seen from where one stands; also if it has no name."""
        relative = os.path.relpath(data, tmp_path)
        nameless = "import socket\nsocket.getfqdn = lambda *_: 'nowhere.invalid'\n"
        (tmp_path / "sitecustomize.py").write_text(nameless)
        command = [project.folder / "launch.sh", *flags(Path(relative), Path("here"))]
        done = run(command, cwd=tmp_path, PYTHONPATH=str(tmp_path)).ok()
        assert done.out.startswith("starting 2 rank(s) ...\n2 rank(s) on CPU")
        assert (tmp_path / "here" / "best.pt").exists()

    def test_wrong_environment(self, project: Project) -> None:
        project.launch(NNODES="2", NODE_RANK="0").refused("MASTER_ADDR")
        run([project.folder / "launch.sh"], NNODES="two").refused("NNODES=two")
        run([project.folder / "launch.sh"], MAX_RESTARTS="-1").refused("MAX_RESTARTS=-1")
        usage = run([project.folder / "launch.sh", "--help"]).ok().out
        for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS"):
            assert name in usage

    def test_one_process_per_gpu(self, project: Project, tmp_path: Path) -> None:
        """As nvidia-smi lists them; without it as torch does, if there is a device; else two."""
        device, tools = tmp_path / "device", tmp_path / "tools"
        tools.mkdir()
        for name in ("bash", "dirname", "env", "grep", "sed", "tr"):
            (tools / name).symlink_to(str(shutil.which(name)))
        shell = str(shutil.which("sh"))
        python = executable(tools / "python", f'#!{shell}\n[ "$1" = -c ] && echo 5 || echo "$@"\n')
        text = (project.folder / "launch.sh").read_text()
        script = executable(tmp_path / "launch.sh", text.replace("/dev/nvidia0", str(device)))
        command = ["env", "-u", "CUDA_VISIBLE_DEVICES", script]
        env = {"NPROC": "", "PATH": str(tools), "PYTHON": str(python)}

        def processes(**more: str) -> str:
            return run(command, **{**env, **more}).ok().out.split("--nproc-per-node ")[1].split()[0]

        assert processes() == "2"
        device.touch()
        assert processes() == "5"
        executable(tools / "nvidia-smi", f"#!{shell}\necho GPU 0; echo GPU 1; echo GPU 2\n")
        assert processes() == "3"
        command[1:3] = []
        assert processes(CUDA_VISIBLE_DEVICES="0,2,5,7") == "4"
        assert processes(CUDA_VISIBLE_DEVICES="") == "2"

    def test_more_ranks_than_gpus(self, project: Project) -> None:
        """The check alone, on a machine that claims two GPUs."""
        said = project.call("ranks.device_of_three", False)
        assert said.startswith("3 ranks on this node but 2 GPU(s): start at most")
        assert project.call("ranks.device_of_three", True) == "cpu"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fake_scontrol(folder: Path) -> dict[str, str]:
    tool = folder / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf 'localhost\\nlocalhost\\n'\n")
    tool.chmod(0o755)
    return {
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(uuid.uuid4().int % 10**6),  # decides on the port
    }


def srun_step(node: int) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
    }


def test_output_files(project: Project, trained: Path) -> None:
    names = {re.sub(r"tfevents\..*", "tfevents", path.name) for path in trained.iterdir()}
    assert names == {
        ".lock",
        "last.pt",
        "best.pt",
        "metrics.csv",
        "args.json",
        "curves.png",
        "examples.png",
        "events.out.tfevents",
    }
    state = torch.load(trained / "last.pt", weights_only=True)
    assert set(state) == {
        *("model", "optimizer", "scheduler", "scaler", "layout", "epoch", "step", "seen"),
        *("totals", "images", "seed", "global_batch", "best", "best_of", "history", "classes"),
        *("resumed_from", "args"),
    }
    args = json.loads((trained / "args.json").read_text())
    assert args["flags"]["epochs"] == 1
    assert args["ranks"] == 2
    assert args["versions"]["torch"] == torch.__version__
    for name in ("curves.png", "examples.png"):
        pixels = np.asarray(Image.open(trained / name))
        assert pixels.std() > 10  # something is drawn


def test_metrics_are_those_of_a_plain_loop(project: Project, data: Path, trained: Path) -> None:
    """Loss and metrics of two ranks against a loop over single pictures, without our engine."""
    found = project.call("evaluating.plain_loop", trained / "last.pt", data)
    loss, pairs = found["loss"], found["pairs"]
    row = rows(trained)[0]
    assert float(row["val_loss"]) == pytest.approx(loss, rel=1e-4)
    guess, truth = np.array(pairs).T
    if project.task == "classification":
        assert len(pairs) == 23
        assert float(row["top1"]) == pytest.approx((guess == truth).mean(), abs=1e-6)
        return
    iou = [
        ((guess == c) & (truth == c)).sum() / ((guess == c) | (truth == c)).sum() for c in (0, 1)
    ]
    assert float(row["iou_background"]) == pytest.approx(iou[0], abs=1e-3)
    assert float(row["iou_crack"]) == pytest.approx(iou[1], abs=1e-3)
    assert float(row["miou"]) == pytest.approx(np.mean(iou), abs=1e-3)


def test_fewer_validation_pictures_than_ranks(
    project: Project, trained: Path, tmp_path: Path
) -> None:
    data = project.draw(tmp_path / "set", 53, 6)
    more = ["--batch-size", 6, "--eval-only"]  # one batch: two of three ranks hold nothing
    results = []
    for ranks in (1, 3):
        done = project.fork(*flags(data, trained), *more, ranks=ranks).ok()
        results.append(json.loads(done.out.splitlines()[-1]))
    assert results[0] == results[1]


@SAME_FOR_BOTH
def test_resume(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    out = shutil.copytree(trained, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    done = project.fork(*flags(data, out, "--epochs", 2)).ok()
    assert "1 of 2 epochs done" in done.out
    assert [row["epoch"] for row in rows(out)] == ["1", "2"]
    assert rows(out)[0] == rows(trained)[0]

    # A mistake found before training begins costs nothing of the former run.
    before = {path.name for path in out.iterdir()}
    project.alone(*flags(data, out, "--resume", "never", "--arch", "none")).refused("none")
    assert {path.name for path in out.iterdir()} == before

    done = project.fork(*flags(data, out, "--resume", "never")).ok()
    assert "--resume never: removing" in done.out
    assert [row["epoch"] for row in rows(out)] == ["1"]
    assert len(list(out.glob("events*"))) == 1
    assert (out / "notes.txt").read_text() == "mine"


@SAME_FOR_BOTH
def test_resume_elsewhere_and_otherwise(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """From a checkpoint of another folder, on one rank instead of two, at another rate."""
    more = ["--resume", trained / "last.pt", "--lr", 0.002]
    done = project.alone(*flags(data, tmp_path, *more, "--epochs", 3)).ok()
    assert "1 of 3 epochs done" in done.out
    assert "--lr 0.002 (was 0.001)" in done.out
    _, second, third = rows(tmp_path)  # the first is the other folder's
    assert (second["epoch"], second["step"]) == ("2", str(6 + 13))
    # Cosine after half an epoch of warm-up: the schedule goes by epochs, not by steps.
    assert float(second["lr"]) == pytest.approx(0.001 * (1 + np.cos(np.pi * 1.5 / 2.5)))
    assert float(third["lr"]) == pytest.approx(0, abs=1e-9)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["epoch"] in (2, 3)  # this folder's own best, though the other's was better
    # The same command once more goes on from what it has reached since.
    done = project.alone(*flags(data, tmp_path, *more, "--epochs", 4)).ok()
    assert f"{tmp_path / 'last.pt'}: 3 of 4 epochs done" in done.out
    assert [row["epoch"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]


def test_evaluation_is_as_in_training(project: Project, data: Path, tmp_path: Path) -> None:
    """--eval-only takes network and picture size from the checkpoint, at any batch size."""
    other = {
        "classification": ["--arch", "squeezenet1_1", "--image-size", 32],
        # With layers that nothing reads.
        "segmentation": ["--encoder", "efficientnet-b0", "--deterministic"],
    }[project.task]
    project.fork(*flags(data, tmp_path, *other)).ok()
    command = ["--data", data, "--output-dir", tmp_path, "--eval-only", "--batch-size", 50]
    found = json.loads(project.alone(*command).ok().out.splitlines()[-1])
    for name, value in found.items():
        assert value == pytest.approx(float(rows(tmp_path)[0][name]), rel=1e-4)


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_pictures_of_different_sizes(
    project: Project, own_data: Path, trained: Path, tmp_path: Path
) -> None:
    """No picture is padded for the sake of another, so the batch size does not matter."""
    for n, path in enumerate(sorted((own_data / "val" / "images").iterdir())):
        mask = own_data / "val" / "masks" / f"{path.stem}.png"
        for each in (path, mask):
            image = Image.open(each)
            image.crop((0, 0, 64 - 7 * (n % 3), 40 + 5 * (n % 2))).save(each)
    results = []
    for size in (1, 4, 23):
        more = ["--eval-only", "--batch-size", size]
        done = project.fork(*flags(own_data, trained, *more)).ok()
        results.append(json.loads(done.out.splitlines()[-1]))
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    assert results[2] == pytest.approx(results[0], rel=1e-4)


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@pytest.mark.parametrize("arch", ["pspnet", "lraspp_mobilenet_v3_large"])
def test_other_networks_train(project: Project, data: Path, tmp_path: Path, arch: str) -> None:
    project.fork(*flags(data, tmp_path, "--arch", arch)).ok()
    more = ["--checkpoint", tmp_path / "best.pt", "--output", tmp_path / "predictions"]
    project.fork(data / "val" / "images", *more, ranks=1, script="predict.py").ok()


@SAME_FOR_BOTH
def test_one_rank_raises(project: Project, data: Path, tmp_path: Path) -> None:
    """A bug in the script: its traceback, once, is all that is said."""
    line = "        if is_last:\n"
    bug = "        if i == 2 and distributed.rank() == 1:\n            raise ValueError('a bug')\n"
    broken = with_bug(project, tmp_path / "broken", line, bug + line)
    done = run([broken, *flags(data, tmp_path / "out")])
    assert done.status == 1
    assert done.err.count("Traceback") == 1
    assert done.err.rstrip().endswith("ValueError: a bug")
    assert not done.left


def test_its_own_tests(project: Project, tmp_path: Path) -> None:
    """All of one kind of project; of the other the one that asks no more than its dataset.py."""
    copy = project.copy(tmp_path / "copy")
    some = ["-k", "loader_workers"] if project.task == "segmentation" else []
    command = [sys.executable, "-m", "pytest", "-q", *some]
    done = run(command, cwd=copy.folder, timeout=600)
    assert " passed" in done.ok().out
    assert "skipped" not in done.out


@SAME_FOR_BOTH
def test_its_own_test_finds_a_generator_that_is_not_seeded(
    project: Project, tmp_path: Path
) -> None:
    """One made in `__init__`; one that is made anew for each sample passes."""
    copy = project.copy(tmp_path / "copy")
    assert copy.call("generators.statuses", fresh=True) == [1, 0]


def wait_for(condition, process, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_checkpoint_that_does_not_fit(
    project: Project, data: Path, own_data: Path, trained: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in trained.iterdir()}

    def launch(*more: object, data: Path = data, out: Path = trained) -> Done:
        return project.alone(*flags(data, out, "--epochs", 2, *more))

    other = {"classification": "resnet34", "segmentation": "fpn"}[project.task]
    launch("--arch", other).refused("last.pt", f"not {other}", "--output-dir")
    if project.task == "classification":
        for part in ("train", "val"):
            shutil.copytree(own_data / part / "dots", own_data / part / "more")
    else:
        launch("--encoder", "resnet18").refused("--encoder mobilenet_v2, not resnet18")
        with open(own_data / "classes.txt", "a") as file:
            file.write("more\n")
    launch(data=own_data).refused("last.pt", "classes", "more" if other == "fpn" else "7")
    assert before == {path.name: path.read_bytes() for path in trained.iterdir()}
    if project.task == "segmentation":
        return  # the rest is the same for both
    launch("--optimizer", "sgd").refused("last.pt", "--optimizer adamw, not sgd")
    launch("--resume", tmp_path / "none.pt").refused("none.pt", "no such file")
    launch("--eval-only", out=tmp_path).refused("best.pt", "no such checkpoint file")
    broken = tmp_path / "broken.pt"
    broken.write_bytes((trained / "last.pt").read_bytes()[:1000])
    fresh = tmp_path / "fresh"
    launch("--resume", broken, out=fresh).refused("broken.pt", "not a readable checkpoint")
    torch.save({"weights": 1}, broken)
    launch("--resume", broken, out=fresh).refused("broken.pt", "not a checkpoint of this project")
    torch.save(Path("of", "no", "plain", "type"), broken)
    launch("--resume", broken, out=fresh).refused("broken.pt", "more than plain types")
    state = torch.load(trained / "last.pt", weights_only=True)
    name = next(iter(state["model"]))
    state["model"][name] = torch.zeros(1)
    torch.save(state, broken)
    launch("--resume", broken, out=fresh).refused("broken.pt", "does not fit", name)
    assert not list(fresh.glob("*.pt"))
    assert before == {path.name: path.read_bytes() for path in trained.iterdir()}


@SAME_FOR_BOTH
def test_flags_that_cannot_be(project: Project, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = project.fork(*flags(data, out, "--batch-size", 27))
    done.refused("--batch-size 27", "53 training images", "2 ranks")

    def refused(*more: object, words: tuple[str, ...]) -> None:
        project.alone(*flags(data, out, *more)).refused(*words)

    refused("--batch-size", 0, words=("--batch-size", "0"))
    refused("--epoch", 3, words=("--epoch",))
    refused("--arch", "resnet99", words=("resnet99",))
    refused("--weights", tmp_path / "none.pt", words=("none.pt", "no such checkpoint file"))
    (tmp_path / "file").touch()
    refused(
        "--output-dir",
        tmp_path / "file",
        words=(str(tmp_path / "file"), "cannot be written"),
    )
    assert not (out / "last.pt").exists()


@SAME_FOR_BOTH
def test_loader_workers_end_with_their_rank(project: Project) -> None:
    """Whichever way Python starts processes by: its default is another from 3.14 on."""
    done = run([sys.executable, SCRIPTS / "loader_workers.py"], cwd=project.folder)
    assert [line.split()[0] for line in done.out.splitlines()] == ["fork", "spawn", "forkserver"]
    assert not done.left


@SAME_FOR_BOTH
def test_flags_from_a_file(project: Project, data: Path, tmp_path: Path) -> None:
    (tmp_path / "flags.txt").write_text("# small\n--optimizer sgd --lr 0.02\n--schedule step\n")
    done = project.fork(*flags(data, tmp_path, f"@{tmp_path / 'flags.txt'}", "--scale-lr")).ok()
    assert "learning rate 0.02 becomes 0.000625" in done.out  # 8 / 256
    args = json.loads((tmp_path / "args.json").read_text())["flags"]
    assert (args["optimizer"], args["lr"], args["schedule"]) == ("sgd", 0.02, "step")
    group = torch.load(tmp_path / "last.pt", weights_only=True)["optimizer"]["param_groups"][0]
    assert group["lr"] == pytest.approx(0.000625)
    assert group["momentum"] == 0.9


def test_weights_of_another_number_of_classes(
    project: Project, own_data: Path, trained: Path, tmp_path: Path
) -> None:
    """Start from a checkpoint's weights: all layers but the last fit."""
    if project.task == "classification":
        for part in ("train", "val"):
            shutil.rmtree(own_data / part / "waves")
    else:
        (own_data / "classes.txt").write_text("ground\ncrack\nroot\n")
    more = ["--weights", trained / "best.pt", "--lr", 0]
    done = project.fork(*flags(own_data, tmp_path / "out", *more)).ok()
    assert re.search(
        r"--weights: \d+ of \d+ tensors loaded; new: \S+weight, \S+bias$",
        done.out,
        re.M,
    )
    old, new = (torch.load(f / "best.pt", weights_only=True) for f in (trained, tmp_path / "out"))
    weights = [name for name in old["model"] if name.endswith("weight")]
    same = [torch.equal(old["model"][name], new["model"][name]) for name in weights]
    assert same == [True] * (len(weights) - 1) + [False]


def test_no_validation_folder(project: Project, own_data: Path, tmp_path: Path) -> None:
    shutil.rmtree(own_data / "val")
    found = project.call("data.parts", own_data)
    train, val = found["parts"]
    assert "images used for validation" in found["said"]
    assert len(train) + len(val) == 53
    assert not set(train) & set(val)
    assert len(val) in (6, 7, 8)  # 15 %, of each class if there are folders of them
    moved = own_data.rename(tmp_path / "elsewhere")
    assert project.call("data.parts", moved)["parts"] == [train, val]


@SAME_FOR_BOTH
def test_drawing_that_was_interrupted(project: Project, tmp_path: Path) -> None:
    target, mark = tmp_path / "demo", uuid.uuid4().hex
    code = "import demo_set, sys, pathlib; demo_set.draw(pathlib.Path(sys.argv[1]))"
    process = start([sys.executable, "-c", code, target], mark, cwd=project.folder)
    wait_for(lambda: len(list(tmp_path.glob("demo.partial-*/train/*/*"))) > 9, process)
    others = ("elsewhere", 2**22 + 1), (socket.gethostname(), os.getpid())
    at_work = {tmp_path / f"demo.partial-{host}-{pid}" for host, pid in others}
    for folder in at_work:
        folder.mkdir()
    process.kill()
    finish(process, mark)
    assert not target.exists()
    assert len(list(tmp_path.glob("demo.partial-*"))) == 3
    project.draw(target, 9, 3)
    assert len(list(target.glob("*/*/*.jpg"))) == 12
    assert {*tmp_path.glob("demo.partial-*")} == at_work
    shutil.rmtree(target)
    process = start([sys.executable, "-c", code, target], mark, cwd=project.folder)
    wait_for(lambda: len(list(tmp_path.glob("demo.partial-*"))) == 3, process)
    process.terminate()
    assert finish(process, mark).status == 128 + signal.SIGTERM
    assert {*tmp_path.glob("demo.partial-*")} == at_work


def test_predict_bad_input(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    def predict(*args: object) -> Done:
        more = ["--output", tmp_path / "p", "--checkpoint", trained / "best.pt"]
        return project.fork(*args, *more, ranks=1, script="predict.py")

    predict(tmp_path / "none").refused("none", "no such file or folder")
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8 no picture")
    predict(tmp_path / "bad.jpg").refused("bad.jpg", "cannot be read")
    assert not list((tmp_path / "p").rglob("*.*"))
    if project.task == "segmentation":  # whose masks would overwrite one another
        for name in ("same.png", "same.jpg"):
            Image.new("RGB", (64, 64)).save(tmp_path / name)
        (tmp_path / "bad.jpg").unlink()
        predict(tmp_path).refused("same.png", "same.jpg")


def test_predict_goes_on(project: Project, own_data: Path, trained: Path, tmp_path: Path) -> None:
    """Pictures that cannot be read are left out and named at the end; names stay as they are."""
    where = {"classification": "*", "segmentation": "images"}[project.task]
    broken, empty, named, *others = sorted((own_data / "train").glob(f"{where}/*.jpg"))
    broken.write_bytes(broken.read_bytes()[:500])
    empty.write_bytes(b"")
    named = named.rename(named.with_name("\udcff.jpg"))
    more = [*{path.parent: None for path in others}, "--checkpoint", trained / "best.pt"]

    def predict(*words: object, script: str | Path = "predict.py") -> Done:
        return project.fork(*more, *words, ranks=1, script=script)

    out = tmp_path / "\udcfe"
    done = predict("--output", out)
    assert done.status == 1
    assert done.out.startswith("51 of 53 images: ")
    first, second = done.err.splitlines()
    assert first.startswith(f"error: {broken}: cannot be read")
    assert second.startswith(f"error: {empty}: cannot be read")
    if project.task == "segmentation":
        names = {path.stem for path in [named, *others]}
        assert {path.stem for path in (out / "masks").iterdir()} == names
        assert {path.stem for path in (out / "overlays").iterdir()} == names
        return

    def files(path: Path) -> list[str]:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            return [row["file"] for row in csv.DictReader(file)]

    # One folder after the other.
    listed = sorted(map(str, [named, *others]))
    assert files(out / "predictions.csv") == listed
    assert [path.name for path in out.iterdir()] == ["predictions.csv"]
    done = predict("--output", tmp_path / "killed", script=SCRIPTS / "predict_killed.py")
    assert done.status == -9
    assert files(tmp_path / "killed" / "predictions.csv.partial") == listed[:30]


@SAME_FOR_BOTH
def test_names_that_are_not_text(project: Project, own_data: Path) -> None:
    """Of a picture and of the folders above it, on a terminal that takes ASCII alone."""
    shutil.rmtree(own_data / "val")
    dots = own_data / "train" / "dots"
    (dots / "0002.jpg").rename(dots / "\udcff.jpg")
    data = own_data.rename(own_data.with_name("\udcfe \u00e9"))
    store, ascii_only = data.with_name("\udcfd"), {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "prepare_data.py", "--data", data, "--output", store]
    assert "53 samples" in run(command, cwd=project.folder, **ascii_only).ok().out
    project.alone(*flags(store, data.with_name("out"))).ok()


def test_pictures_of_every_kind(project: Project, trained: Path, tmp_path: Path) -> None:
    """Grey, 16-bit, with alpha, with a palette, CMYK, and one that a camera held upright."""
    ramp = np.arange(40 * 96).reshape(40, 96)
    kinds = {
        "grey.png": Image.fromarray((ramp // 16).astype(np.uint8)),
        "deep.png": Image.fromarray((ramp * 17).astype(np.uint16)),
        "alpha.png": Image.new("RGBA", (96, 40), (200, 30, 30, 128)),
        "palette.png": Image.new("P", (96, 40), 3),
        "cmyk.jpg": Image.new("CMYK", (96, 40), (9, 99, 9, 9)),
    }
    for name, image in kinds.items():
        image.save(tmp_path / name)
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 90 degrees
    Image.new("RGB", (96, 40)).save(tmp_path / "turned.jpg", exif=turned)
    more = ["--output", tmp_path / "p", "--checkpoint", trained / "best.pt"]
    project.fork(tmp_path, *more, ranks=1, script="predict.py").ok()
    if project.task == "classification":
        with open(tmp_path / "p" / "predictions.csv", newline="") as file:
            found = [Path(row["file"]).name for row in csv.DictReader(file)]
        assert found == sorted([*kinds, "turned.jpg"])
    else:
        sizes = {p.stem: Image.open(p).size for p in (tmp_path / "p" / "masks").iterdir()}
        assert sizes == {
            **{Path(name).stem: (96, 40) for name in kinds},
            "turned": (40, 96),
        }
    assert project.call("decoding.extrema", tmp_path / "deep.png")[0] == [0, 254]
