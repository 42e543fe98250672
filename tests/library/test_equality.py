"""The same training, to the bit, as by the projects of an older commit, which is the reference.

A change that is meant to change what is learnt takes its own commit as the reference.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from digest import SPEED
from generated import ROOT, Project, after_step, both_tasks
from PIL import Image
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="a copy without history, and so without older commits"
)
REFERENCE = "027e21f"
COMMON = "--image-size 32 --batch-size 4 --epochs 2 --workers 0 --weights none"
KERNELS = {"params", "part", "fused", "foreach", "capturable", "differentiable", "maximize"}
# Ranks and flags; "real": networks of torchvision and of segmentation_models, not the tiny one.
CASES = {
    "classification": {
        "real": (1, "--arch shufflenet_v2_x0_5 --augment rand,color,erasing --workers 1"),
        "two ranks": (2, "--schedule step --mixup 0.4 --class-weights auto"),
        "three ranks": (
            3,
            "--accumulate 2 --batch-size 2 --ema 0.9 --class-weights 1,2,0.5,1,3,0.25 --cutmix 1 "
            "--optimizer sgd --clip-grad-norm 0.1 --schedule poly --label-smoothing 0.1",
        ),
    },
    "segmentation": {
        "real": (
            1,
            "--arch linknet --encoder tu-mobilenetv2_035 --augment color,rotation,vflip "
            "--loss focal+0.5*dice+0.3*lovasz --workers 1",
        ),
        "two ranks": (2, "--freeze-backbone 1 --backbone-lr 0.1 --schedule wsd --amp bf16"),
        "three ranks": (
            3,
            "--accumulate 2 --batch-size 2 --ema 0.9 --class-weights auto --cutmix 1",
        ),
    },
}


class Tiny(nn.Module):
    """With BatchNorm and dropout: whatever can go astray. For labels of images or of pixels."""

    def __init__(self, outputs: int, is_of_pixels: bool) -> None:
        super().__init__()
        first = nn.Conv2d(3, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.ReLU()
        then = nn.Dropout(0.2), nn.Conv2d(8, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU()
        self.encoder = nn.Sequential(*first, *then)
        self.decoder = nn.Conv2d(16, outputs, 1)
        self.is_of_pixels = is_of_pixels

    def forward(self, images: Tensor) -> Tensor:
        logits = self.decoder(self.encoder(images))
        if self.is_of_pixels:
            return nn.functional.interpolate(logits, images.shape[-2:])
        return logits.mean((2, 3))


def build_tiny(step: int = 0, signum: int = 0) -> None:
    """A patch: the network takes no time to build; after this step there is that signal.

    SIGTERM goes to the last rank, others to all.
    """
    import model

    ranks = int(os.environ["WORLD_SIZE"])
    last = (ranks - 1,) if signum == signal.SIGTERM else ()
    if step:
        after_step(step, lambda: os.kill(os.getpid(), signum), *last)()

    is_of_pixels = Path("losses.py").exists()
    model.build_model = lambda args, classes, *_, **more: Tiny(len(classes), is_of_pixels)


def thin_out(data: Path) -> None:
    """Leave classes of unequal size, and from none to all of a mask unlabelled."""
    for path in sorted(data.glob("train/dots/*"))[1:]:
        path.unlink()
    for n, path in enumerate(sorted(data.glob("*/masks/*"))):
        mask = np.array(Image.open(path))
        mask[: 11 * (n % 7)] = 255
        Image.fromarray(mask).save(path)


def flat(path: Path) -> dict[str, object]:
    """All that a checkpoint holds of the training, by name: tensors, and the text of the rest."""
    state = torch.load(path, weights_only=True)
    found: dict[str, object] = {
        f"{part} {name}": value
        for part in ("model", "trained")
        for name, value in state.get(part, {}).items()
    }
    groups = state["optimizer"]["param_groups"]
    # The reference has numbers in place of names, and those in an entry of its own.
    named = state["layout"]["optimizer"][1] if "layout" in state else [g["params"] for g in groups]
    names = [[name.removeprefix("trained.") for name in group] for group in named]
    for number, group in enumerate(groups):
        rate = state["scheduler"]["_last_lr"][number]
        settings = {key: value for key, value in group.items() if key not in KERNELS}
        for index, name in zip(group["params"], names[number], strict=True):
            values = {**settings, "_last_lr": rate, **state["optimizer"]["state"].get(index, {})}
            found |= {f"optimizer {name} {key}": value for key, value in values.items()}
    for row in state["history"]:
        measured = {key: value for key, value in row.items() if key not in SPEED}
        found |= {f"history {row['epoch']} {key}": value for key, value in measured.items()}
    found |= {key: state[key] for key in ("epoch", "step", "seen", "totals", "best", "scaler")}
    return {key: v if isinstance(v, Tensor) else repr(v) for key, v in found.items()}


def differences(reference: Path, today: Path) -> list[str]:
    """What differs in the two last.pt, a line each."""
    then, now = (flat(folder / "last.pt") for folder in (reference, today))
    lines = [f"{key}: only on one side" for key in then.keys() ^ now.keys()]
    for key in then.keys() & now.keys():
        old, new = then[key], now[key]
        if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
            if old.dtype != new.dtype or old.numpy().tobytes() != new.numpy().tobytes():
                most = (old.double() - new.double()).abs().max()
                lines.append(f"{key}: {int((old != new).sum())} of {old.numel()}, by {most:.1e}")
        elif type(old) is not type(new) or isinstance(old, Tensor) or old != new:
            lines.append(f"{key}: {old} then, {new} now")
    return sorted(lines)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as it was."""
    folder, git = tmp_path_factory.mktemp("reference"), ["git", "-C", str(ROOT)]
    known = [*git, "cat-file", "-e", f"{REFERENCE}^{{commit}}"]
    if subprocess.run(known, stderr=subprocess.DEVNULL).returncode:
        line = f"this clone does not reach back to commit {REFERENCE}: git fetch --unshallow"
        pytest.fail(line, pytrace=False)
    archive = folder / "reference.zip"
    subprocess.run([*git, "archive", "--output", str(archive), REFERENCE], check=True)
    shutil.unpack_archive(archive, folder / "template")
    return folder / "template"


@both_tasks
def test_the_same_bits(
    project: Project, reference: Path, clean_home: dict[str, str], tmp_path: Path
) -> None:
    """Of three runs on 1, 2 and 3 ranks; and of one that is stopped, killed and resumed."""
    words = ["--no-input", "-o", str(tmp_path), str(reference), f"task={project.task}"]
    command = [sys.executable, "-m", "cookiecutter", *words]
    subprocess.run(command, env=clean_home, check=True, capture_output=True)
    older = Project(tmp_path / "my_ddp_project", project.task)
    data = project.draw(tmp_path / "data", 30, 9)
    thin_out(data)
    for name, (ranks, words) in CASES[project.task].items():
        sides = tmp_path / f"{name} then", tmp_path / f"{name} now"
        patch = None if name == "real" else build_tiny
        flags = ["--data", data, *COMMON.split(), *words.split(), "--output-dir"]
        for side, out in zip((older, project), sides, strict=True):
            more = ["--threads", 1] if side is older else []
            side.run(*flags, out, *more, on=ranks, patch=patch).ok()
        assert not differences(*sides), name
        if name == "real":
            continue
        for step, signum, status in (2, signal.SIGTERM, 75), (3, signal.SIGKILL, -9), (0, 0, 0):
            stopped = functools.partial(build_tiny, step, signum)
            more = "--save-every", 1
            done = project.run(*flags, tmp_path / name, *more, on=ranks, patch=stopped)
            assert done.statuses == [status] * ranks, done.err
        assert not differences(sides[0], tmp_path / name), name
        said = [
            side.run(*flags, out, "--eval-only", on=ranks, patch=patch).ok().out.splitlines()[-1]
            for side, out in zip((older, project), sides, strict=True)
        ]
        assert said[0] == said[1]
        assert json.loads(said[0])["val_loss"] > 0
