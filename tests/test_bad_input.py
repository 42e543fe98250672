"""What a user gets wrong: one line that names it, every rank gone, nothing half written."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import NETS, SAME_FOR_BOTH, SMALL, Done, Project, edited, flags, rows

Spoil = Callable[[Path], None]


def first(folder: Path) -> Path:
    return sorted(path for path in folder.rglob("*") if path.is_file())[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def odd_exif(path: Path) -> None:
    """A picture to be turned, whose entry "rows per strip" is text."""
    exif = Image.Exif()
    exif[0x0112], exif[0x0116] = 6, 5
    Image.new("RGB", (64, 64)).save(path, exif=exif)
    content = path.read_bytes()
    order = "<" if b"II*" in content else ">"
    (kind,) = (k for k in (3, 4) if struct.pack(f"{order}HH", 0x0116, k) in content)
    old, new = (struct.pack(f"{order}HH", 0x0116, k) for k in (kind, 2))
    path.write_bytes(content.replace(old, new))


def empty(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        path.unlink()


def repaint(folder: Path, labels: dict[int, int]) -> None:
    """Give the classes in the training masks other numbers."""
    for path in (folder / "train" / "masks").iterdir():
        Image.open(path).point(lambda value: labels.get(value, value)).save(path)


SPOILT: dict[str, dict[str, tuple[Spoil, list[str]]]] = {
    "classification": {
        "no train folder": (lambda d: shutil.rmtree(d / "train"), ["train", "no such"]),
        "no pictures": (
            lambda d: empty(d / "train" / "dots"),
            ["train/dots", "no images"],
        ),
        "class missing in train": (
            lambda d: shutil.rmtree(d / "train" / "dots"),
            ["train", "dots"],
        ),
        "class whose name is no text": (
            lambda d: [
                (d / part / "dots").rename(d / part / "\udcff") for part in ("train", "val")
            ],
            ["train/\\udcff", "not UTF-8", "rename"],
        ),
        "truncated": (
            lambda d: truncate(first(d / "train")),
            ["train/bricks/0000.jpg", "truncated"],
        ),
        "no picture at all": (
            lambda d: (d / "train" / "dots" / "0002.jpg").write_text("x"),
            ["dots/0002.jpg", "cannot be read"],
        ),
        "odd EXIF": (
            lambda d: odd_exif(d / "train" / "dots" / "0002.jpg"),
            ["dots/0002.jpg", "cannot be read"],
        ),
        "empty file": (
            lambda d: (d / "val" / "dots" / "0002.jpg").write_bytes(b""),
            ["val/dots/0002.jpg", "cannot be read"],
        ),
    },
    "segmentation": {
        "no train folder": (lambda d: shutil.rmtree(d / "train"), ["train", "no such"]),
        "no pictures": (
            lambda d: empty(d / "train" / "images"),
            ["train/images", "no images"],
        ),
        "mask without picture": (
            lambda d: (d / "train/images/0003.jpg").unlink(),
            ["masks/0003.png", "train/images"],
        ),
        "picture without mask": (
            lambda d: (d / "val/masks/0003.png").unlink(),
            ["images/0003.jpg", "val/masks"],
        ),
        "sizes differ": (
            lambda d: Image.new("L", (64, 60)).save(d / "train/masks/0003.png"),
            ["masks/0003.png", "64 x 60", "64 x 64"],
        ),
        "label outside the classes": (
            lambda d: Image.new("L", (64, 64), 7).save(d / "train/masks/0003.png"),
            ["masks/0003.png", "value 7", "no class", "NAME = 7"],
        ),
        "label below 0": (
            lambda d: Image.fromarray(np.full((64, 64), -2, np.int32)).save(
                (d / "train/masks/0003.png").rename(d / "train/masks/0003.tif")
            ),
            ["masks/0003.tif", "value -2", "no class"],
        ),
        "two pictures of one name": (
            lambda d: Image.new("RGB", (64, 64)).save(d / "train/images/0003.png"),
            ["images/0003.jpg", "images/0003.png", "same name"],
        ),
        "two classes of one name": (
            lambda d: (d / "classes.txt").write_text("ground\ncrack\ncrack\n"),
            ["classes.txt", "crack: its name or its value comes twice"],
        ),
        "nothing but void": (
            lambda d: [
                Image.new("L", (64, 64), 255).save(path) for path in (d / "val/masks").iterdir()
            ],
            ["all are void"],
        ),
        "mask in colour": (
            lambda d: Image.new("RGB", (64, 64)).save(d / "train/masks/0003.png"),
            ["masks/0003.png", "colour 0 0 0", "NAME = 0 0 0"],
        ),
        "truncated": (
            lambda d: truncate(d / "train/images/0003.jpg"),
            ["images/0003.jpg", "truncated"],
        ),
        "255 for the class": (
            lambda d: repaint(d, {1: 255}),
            ["own: the training masks hold 0, 255", "NAME = 255"],
        ),
        "255 for the class, without its name": (
            lambda d: (repaint(d, {1: 255}), (d / "classes.txt").unlink()),
            ["own: the training masks hold 0, 255", "NAME = 0, NAME = 255"],
        ),
        "one class alone": (
            lambda d: repaint(d, {0: 1}),
            ["own: the training masks hold 1, 255 (255 is void)"],
        ),
        "no class": (
            lambda d: repaint(d, {0: 255, 1: 255}),
            ["own: the training masks hold 255 (255 is void)"],
        ),
    },
}


@pytest.mark.parametrize(
    ("project", "case"),
    [(task, case) for task, cases in SPOILT.items() for case in cases],
    indirect=["project"],
)
def test_spoilt_data(project: Project, own_data: Path, tmp_path: Path, case: str) -> None:
    spoil, words = SPOILT[project.task][case]
    spoil(own_data)
    # One worker: its exceptions reach the rank as text.
    flags = [*SMALL, *NETS[project.task], "--image-size", 32, "--workers", 1, "--data", own_data]
    project.fork(*flags, "--output-dir", tmp_path / "out").refused(*words)
    assert not (tmp_path / "out" / "best.pt").exists()  # no epoch has been finished


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_a_class_that_is_rare(project: Project, own_data: Path) -> None:
    """In one training mask of 53 only: that is not a mistake."""
    repaint(own_data, {1: 255})
    Image.new("L", (64, 64), 1).save(own_data / "train" / "masks" / "0030.png")
    assert project.call("data.found", own_data) == "53 23 background crack"


def test_folders_to_leave_out(project: Project, own_data: Path, tmp_path: Path) -> None:
    """What editors and archives leave, and links back up, add no picture, class or copy."""
    before = project.call("data.found", own_data)
    assert before.startswith("53 23 ")
    train = own_data / "train"
    folders = [train / "images", train / "masks"]
    if project.task == "classification":
        folders = [train / "dots"]
        shutil.copytree(train / "dots", train / "__MACOSX")
        (train / "again").symlink_to(own_data)
    for folder in folders:
        within = [path for path in sorted(folder.iterdir()) if path.is_file()]
        for name in (".ipynb_checkpoints", "__MACOSX"):
            (folder / name).mkdir()
            shutil.copy(within[0], folder / name)
        for name, target in ("loop", folder), ("up", train), ("here", "."):
            (folder / name).symlink_to(target)
        # Pictures that lie elsewhere, linked twice, and from there a link back.
        elsewhere = tmp_path / "elsewhere" / folder.name
        elsewhere.mkdir(parents=True)
        for path in within[:3]:
            path.rename(elsewhere / path.name)
        for name in ("one", "two"):
            (folder / name).symlink_to(elsewhere)
        (elsewhere / "back").symlink_to(train)
    assert project.call("data.found", own_data) == before


Change = tuple[str, str]
LOSS = "            loss = run.loss(loss_sum, count)  # divided by what is equal on all ranks\n"
BACKWARD = "            scaler.scale(loss).backward()\n"
DIVIDE = "            run.divide_gradients(ddp_model)\n"
STEP = "            scaler.step(optimizer)\n"
ZERO = "            optimizer.zero_grad()\n"
OWN_LOSS = "            loss = nn.functional.cross_entropy(outputs, targets)\n"
OWN_BACKWARD = "            loss.backward()\n"
FORWARD = "                outputs = ddp_model(images)\n"
JUDGE = "judge(model, val_loader)\n            lr"
NOT_DIVIDED = "call run.divide_gradients(ddp_model) after its last backward()"
ZEROED = "zero_grad() after "
ANOTHER = "evaluate() judged another network than Run(model=...)"
MISUSES: dict[str, tuple[list[Change], str]] = {
    "undivided": ([(DIVIDE, "")], NOT_DIVIDED),
    "own loss": ([(LOSS, OWN_LOSS), (BACKWARD, OWN_BACKWARD)], "run.loss was called 0 time(s)"),
    "own loss, undivided": (
        [(LOSS, OWN_LOSS), (BACKWARD, OWN_BACKWARD), (DIVIDE, "")],
        NOT_DIVIDED,
    ),
    "zeroed": ([(ZERO, ""), (DIVIDE, ZERO + DIVIDE)], ZEROED),
    "zeroed after the division": ([(ZERO, ""), (STEP, ZERO + STEP)], ZEROED),
    "unscaled": ([(BACKWARD, OWN_BACKWARD)], "scaler.scale(loss).backward()"),
    "never zeroed": ([(ZERO, "")], "the gradients of the step before are still there"),
    "no end": ([("            run.end_step()", "            pass")], "run.end_step was not called"),
    "past DDP": (
        [(FORWARD, FORWARD.replace("ddp_model", "ddp_model.module"))],
        "a step without a call of ddp_model",
    ),
    "a copy": ([(JUDGE, JUDGE.replace("model", "__import__('copy').deepcopy(model)"))], ANOTHER),
    "no average": ([(JUDGE, JUDGE.replace("model", "trained"))], ANOTHER),
}


def train(project: Project, data: Path, folder: Path, changes: list[Change], *more: object) -> Done:
    main = edited(project, folder / "copy", *changes).folder / "main.py"
    return project.fork(*flags(data, folder / "out", *more), script=main)


@SAME_FOR_BOTH
@pytest.mark.parametrize("name", MISUSES)
def test_training_steps(project: Project, few: Path, tmp_path: Path, name: str) -> None:
    """At the first step; another network than the saved one after the first epoch."""
    changes, words = MISUSES[name]
    more = {"no average": ("--ema", 0.9), "unscaled": ("--amp", "fp16")}.get(name, ())
    done = train(project, few, tmp_path, changes, *more)
    done.refused(words)
    assert done.status == 2
    assert (tmp_path / "out" / "last.pt").exists() == (words == ANOTHER)
    assert not (tmp_path / "out" / "best.pt").exists()


SAMPLER = "        sampler=sampler,\n"
OTHER_LOADER = "ddpkit.Seeded needs ddpkit.TrainSampler or ValSampler as the loader's sampler"


@SAME_FOR_BOTH
def test_other_loops(project: Project, few: Path, tmp_path: Path) -> None:
    """zero_grad() before backward(), as in torch's tutorials, trains; half a loader does not."""
    before = [(ZERO, ""), (BACKWARD, f"{ZERO}{BACKWARD}")]
    train(project, few, tmp_path / "before", before).ok()
    half = train(project, few, tmp_path / "half", [(SAMPLER, "        shuffle=True,\n")])
    half.refused(OTHER_LOADER)
    assert half.status == 2


TO_DEVICE = "    model = model.to(device)"
TUPLE = "    forward = model.forward\n    model.forward = lambda x: (forward(x), x.sum())\n"
RETURNS_TUPLE = (TO_DEVICE, TUPLE + TO_DEVICE)
CRITERION = "ddpkit.criterion(build_criterion(args, train_set, classes).to(device))"
MEAN = (CRITERION, "ddpkit.criterion(nn.CrossEntropyLoss(ignore_index=255))")
NO_VOID = (CRITERION, "ddpkit.criterion(nn.CrossEntropyLoss())")
OF_THE_FIRST = (
    CRITERION,
    "ddpkit.criterion(lambda outputs, targets: "
    "nn.functional.cross_entropy(outputs[0], targets, ignore_index=255))",
)


def test_losses_and_outputs(project: Project, few: Path, tmp_path: Path) -> None:
    """A mean is weighed by its labels, void left out; metrics take the first of several outputs."""
    own = shutil.copytree(few, tmp_path / "own")
    for number, path in enumerate(sorted(own.glob("*/masks/*"))):
        mask = np.array(Image.open(path))
        mask[: number % 5 * 12] = 255
        Image.fromarray(mask).save(path)
    recipe = ("--optimizer", "sgd", "--lr", 0.01, "--warmup-epochs", 0)
    found = []
    for name, changes in (("pair", []), ("mean", [MEAN]), ("tuple", [RETURNS_TUPLE, OF_THE_FIRST])):
        train(project, own, tmp_path / name, changes, *recipe).ok()
        state = torch.load(tmp_path / name / "out" / "last.pt", weights_only=True)
        (row,) = rows(tmp_path / name / "out")
        losses = [float(row["train_loss"]), float(row["val_loss"])]
        weights = torch.cat([weight.flatten().double() for weight in state["model"].values()])
        found.append((losses, weights))
    for losses, weights in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-6)
        assert (weights - found[0][1]).abs().max() < 1e-6


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_a_loss_that_does_not_know_void(project: Project, few: Path, tmp_path: Path) -> None:
    done = train(project, few, tmp_path, [NO_VOID])
    done.refused("a target is no class number", "ignore_index=255")
    assert done.status == 2
