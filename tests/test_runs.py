"""Real runs of generated projects: resume, output files, metrics, flags, their own tests."""

import json
import os
import re
import shutil
import socket
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import SAME_FOR_BOTH, Done, Project, finish, flags, rows, run, start, wait_for


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
        "per_class.csv",
        "confusion.png",
        "worst.png",
        "events.out.tfevents",
    }
    state = torch.load(trained / "last.pt", weights_only=True)
    assert set(state) == {
        *("model", "optimizer", "scheduler", "scaler", "kinds", "epoch", "step", "seen"),
        *("totals", "images", "seed", "global_batch", "best", "best_of", "history", "classes"),
        *("colors", "resumed_from", "args", "sampler", "training_set", "format", "channels"),
    }
    args = json.loads((trained / "args.json").read_text())
    assert args["flags"]["epochs"] == 1
    assert args["ranks"] == 2
    assert args["versions"]["torch"] == torch.__version__
    for name in ("curves.png", "examples.png", "confusion.png", "worst.png"):
        pixels = np.asarray(Image.open(trained / name))
        assert pixels.std() > 10  # something is drawn


def test_metrics_are_those_of_a_plain_loop(project: Project, data: Path, trained: Path) -> None:
    """Loss and metrics of two ranks against a loop over single pictures, without our library."""
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
    # One batch: two of three ranks hold nothing.
    more = ["--batch-size", 6, "--eval-only", "--resume", trained / "best.pt"]
    results = []
    for ranks in (1, 3):
        done = project.fork(*flags(data, tmp_path / "out"), *more, ranks=ranks, draws=ranks == 3)
        results.append(json.loads(done.ok().out.splitlines()[-1]))
        assert done.err == ""
    assert results[0] == results[1]


@SAME_FOR_BOTH
def test_resume(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    out = shutil.copytree(trained, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    done = project.fork(*flags(data, out, "--epochs", 2), draws=False).ok()
    assert "1 of 2 epochs done" in done.out
    assert [row["epoch"] for row in rows(out)] == ["1", "2"]
    assert rows(out)[0] == rows(trained)[0]

    # A mistake found before training begins costs nothing of the former run.
    before = {path.name for path in out.iterdir()}
    project.alone(*flags(data, out, "--resume", "never", "--arch", "none")).refused("none")
    assert {path.name for path in out.iterdir()} == before

    done = project.fork(*flags(data, out, "--resume", "never"), draws=False).ok()
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
    done = project.alone(*flags(data, tmp_path, *more, "--epochs", 3), draws=False).ok()
    assert "1 of 3 epochs done" in done.out
    assert "--lr 0.002 (was None)" in done.out
    _, second, third = rows(tmp_path)  # the first is the other folder's
    assert (second["epoch"], second["step"]) == ("2", str(6 + 13))
    # Cosine after half an epoch of warm-up: the schedule goes by epochs, not by steps.
    assert float(second["lr"]) == pytest.approx(0.001 * (1 + np.cos(np.pi * 1.5 / 2.5)))
    assert float(third["lr"]) == pytest.approx(0, abs=1e-9)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["epoch"] in (2, 3)  # this folder's own best, though the other's was better
    # The same command once more goes on from what it has reached since.
    done = project.alone(*flags(data, tmp_path, *more, "--epochs", 4), draws=False).ok()
    assert f"{tmp_path / 'last.pt'}: 3 of 4 epochs done" in done.out
    assert [row["epoch"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]


def test_evaluation_is_as_in_training(project: Project, data: Path, tmp_path: Path) -> None:
    """--eval-only takes network and picture size from the checkpoint, at any batch size."""
    other = {
        "classification": ["--arch", "squeezenet1_1", "--image-size", 32],
        # With layers that nothing reads.
        "segmentation": ["--encoder", "efficientnet-b0", "--deterministic"],
    }[project.task]
    project.fork(*flags(data, tmp_path, *other), draws=False).ok()
    command = ["--data", data, "--output-dir", tmp_path, "--eval-only", "--batch-size", 50]
    found = json.loads(project.alone(*command, draws=False).ok().out.splitlines()[-1])
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
    for size in (1, 23):
        more = ["--eval-only", "--resume", trained / "best.pt", "--batch-size", size]
        done = project.fork(*flags(own_data, tmp_path / "out", *more), draws=size == 23).ok()
        results.append(json.loads(done.out.splitlines()[-1]))
    assert results[1] == pytest.approx(results[0], rel=1e-4)


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@pytest.mark.parametrize("arch", ["pspnet", "lraspp_mobilenet_v3_large"])
def test_other_networks_train(project: Project, data: Path, tmp_path: Path, arch: str) -> None:
    project.fork(*flags(data, tmp_path, "--arch", arch), draws=False).ok()
    more = ["--checkpoint", tmp_path / "best.pt", "--output", tmp_path / "predictions"]
    project.fork(data / "val" / "images", *more, ranks=1, script="predict.py").ok()


@SAME_FOR_BOTH
def test_its_own_tests(project: Project, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "copy")
    done = run([sys.executable, "-m", "pytest", "-q"], cwd=copy.folder, timeout=600)
    assert " passed" in done.ok().out
    assert "skipped" not in done.out


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_its_own_test_finds_a_generator_that_is_not_seeded(
    project: Project, tmp_path: Path
) -> None:
    """One that all samples share; none, and one that is made anew for each sample, pass."""
    copy = project.copy(tmp_path / "copy")
    assert project.call("generators.statuses", copy.folder) == [0, 1, 0]


def test_checkpoint_that_does_not_fit(
    project: Project, data: Path, own_data: Path, trained: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in trained.iterdir()}

    def launch(*more: object, data: Path = data, out: Path = trained) -> Done:
        return project.alone(*flags(data, out, "--epochs", 2, *more))

    other = {"classification": "resnet34", "segmentation": "fpn"}[project.task]
    launch("--arch", other).refused("last.pt", f"--arch {other} (was", "--output-dir")
    if project.task == "classification":
        for part in ("train", "val"):
            shutil.copytree(own_data / part / "dots", own_data / part / "more")
    else:
        launch("--encoder", "resnet18").refused("--encoder resnet18 (was tu-mobilenetv2_035)")
        with open(own_data / "classes.txt", "a") as file:
            file.write("more\n")
    launch(data=own_data).refused("last.pt has", "classes", "the data has")
    assert before == {path.name: path.read_bytes() for path in trained.iterdir()}
    if project.task == "segmentation":
        return  # the rest is the same for both
    launch("--optimizer", "sgd").refused("last.pt", "was AdamW and is SGD")
    launch("--resume", tmp_path / "none.pt").refused("none.pt", "no such file")
    launch("--eval-only", out=tmp_path).refused("best.pt", "cannot be read (No such file")
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
    refused("--weights", tmp_path / "none.pt", words=("none.pt", "cannot be read (No such file"))
    (tmp_path / "file").touch()
    refused(
        "--output-dir",
        tmp_path / "file",
        words=(str(tmp_path / "file"), "cannot be written"),
    )
    assert not (out / "last.pt").exists()


@SAME_FOR_BOTH
def test_flags_from_a_file(project: Project, data: Path, tmp_path: Path) -> None:
    (tmp_path / "flags.txt").write_text("# small\n--optimizer sgd --lr 0.02\n--schedule step\n")
    project.fork(*flags(data, tmp_path, f"@{tmp_path / 'flags.txt'}"), draws=False).ok()
    args = json.loads((tmp_path / "args.json").read_text())["flags"]
    assert (args["optimizer"], args["lr"], args["schedule"]) == ("sgd", 0.02, "step")
    group = torch.load(tmp_path / "last.pt", weights_only=True)["optimizer"]["param_groups"][0]
    assert group["lr"] == pytest.approx(0.02)
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
    done = project.fork(*flags(own_data, tmp_path / "out", *more), draws=False).ok()
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
    code = "import dataset, sys, pathlib; dataset.draw_demo(pathlib.Path(sys.argv[1]))"
    process = start([sys.executable, "-c", code, target], mark, cwd=project.folder)
    wait_for(lambda: len(list(tmp_path.glob("demo.partial-*/train/*/*"))) > 9, process)
    others = ("elsewhere", 2**22 + 1), (socket.gethostname(), os.getpid())
    at_work = {tmp_path / f"demo.partial-{host}-{pid}" for host, pid in others}
    for folder in at_work:
        folder.mkdir()
    process.kill()
    said = finish(process, mark).out
    assert said == f"drawing the demo set in {os.path.relpath(target, project.folder)} ...\n"
    assert not target.exists()
    assert len(list(tmp_path.glob("demo.partial-*"))) == 3
    project.draw(target, 9, 3)
    assert len(list(target.glob("*/*/*.jpg"))) == 12
    assert {*tmp_path.glob("demo.partial-*")} == at_work


def test_flags_that_eval_only_takes_from_the_checkpoint(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """The defaults of the demo set are for training it."""
    assert project.call("flags.image_size") == 64
    arch = {"classification": "shufflenet_v2_x0_5", "segmentation": "linknet"}[project.task]
    words = [trained / "best.pt", tmp_path / "other.pt", "--data", data]
    found = project.call("evaluating.flags_of_eval_only", *words)
    tile = 256 if project.task == "segmentation" else None
    assert found == {"image_size": 96, "tile": tile, "arch": arch, "batch_size": 3}
    given = ["--image-size", "64", "--batch-size", "5"]
    found = project.call("evaluating.flags_of_eval_only", *words, *given)
    assert (found["image_size"], found["batch_size"]) == (64, 5)
