"""Losses: what they come to, on any number of ranks, passes and images per batch."""

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from running import SCRIPTS, Project, rows, small

from ddpkit.errors import UserError
from ddpkit.ranks import replicas
from ddpkit.run import metrics
from ddpkit.run.flags import Parser

SEGMENTATION = pytest.mark.parametrize("project", ["segmentation"], indirect=True)
CLASSIFICATION = pytest.mark.parametrize("project", ["classification"], indirect=True)
LOSS_FLAGS = {
    "classification": ("--label-smoothing", "0.1", "--class-weights", "0.2,1,5,1,1,1"),
    "segmentation": ("--loss", "ce+0.5*dice+lovasz+focal", "--class-weights", "0.2,5"),
}


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("1,2.5", (1.0, 2.5)), ("(0.5, 0.0)", (0.5, 0.0))]
)
def test_class_weights(text: str, value: object) -> None:
    """Also as checkpoints and shells may write them."""
    assert Parser.class_weights(text) == value


@pytest.mark.parametrize("text", ["0,0", "1,-1", "weights.csv", ""])
def test_class_weights_that_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="numbers of 0 or more, not all 0"):
        Parser.class_weights(text)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (torch.ones(1), "a tensor (1,)"),
        ((torch.ones(1), 4), "tuple"),
        ((torch.ones(()), torch.ones(1)), "tuple"),
        ((2.5, 4), "tuple"),
        ((torch.ones(()), 4, 1), "tuple"),
        ({"ce": 1}, "dict"),
        (None, "NoneType"),
    ],
)
def test_losses_of_other_kinds(found: object, text: str) -> None:
    with pytest.raises(UserError, match=f"model.py returns {re.escape(text)}: return a mean"):
        metrics.criterion(lambda *_: found)(torch.ones(4, 2), torch.ones(4))


def test_a_mean_counts_as_much_as_its_batch_has_labels() -> None:
    """Those of void are none, such as 255, -1 or -100."""
    outputs = torch.randn(2, 3, 4, 4).bfloat16()
    for void in (255, -1, -100):
        targets = torch.randint(3, (2, 4, 4))
        targets[0, :3] = void
        loss = torch.nn.CrossEntropyLoss(ignore_index=void)
        total, count = metrics.criterion(loss)(outputs, targets)
        whole = torch.nn.CrossEntropyLoss(ignore_index=void, reduction="sum")
        assert int(count) == 2 * 16 - 12
        assert torch.allclose(total, whole(outputs.float(), targets))


def test_sizes() -> None:
    """Targets are counted, those with shares of the classes as one each."""
    for targets, size in (
        (torch.zeros(6, dtype=torch.int64), 6),
        (torch.zeros(6, 4, 4, dtype=torch.int64), 96),
        (torch.zeros(6, 10), 6),
        (torch.zeros(6), 6),
    ):
        assert metrics.size(targets) == size


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_passes_of_unequal_size(kind: Callable[[int], int | torch.Tensor]) -> None:
    """Each sample counts as much as any other of the step."""
    net, device = torch.nn.Linear(1, 1), torch.device("cpu")
    mean = replicas.Mean(device)
    for sizes in (6, 6), (3,), (2, 2, 2) if kind is int else (1, 1, 6):
        for i, size in enumerate(sizes):
            mean.start(size if kind is int else 8)
            loss_sum = net(torch.full((size, 1), float(i))).sum()
            mean.loss(loss_sum, kind(size), i == len(sizes) - 1).backward()
        mean.finish(net, len(sizes))
        every = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).float()
        assert torch.allclose(net.weight.grad, every.mean())
        assert torch.allclose(net.bias.grad, torch.ones(1))
        net.zero_grad()


def test_counts_that_are_known() -> None:
    """They need no collective, which fails here; and cannot be mixed with others."""
    net = torch.nn.Linear(1, 1)
    loss = torch.zeros((), requires_grad=True)

    def begin() -> replicas.Mean:
        mean = replicas.Mean(torch.device("cpu"))
        mean.start(6)
        for weight in net.parameters():
            weight.grad = torch.ones_like(weight)
        return mean

    for passes, left in (1, 1), (2, 0.5):
        mean = begin()
        for i in range(passes):
            mean.loss(loss, 6, i == passes - 1)
        mean.finish(net, passes)
        assert net.bias.grad == net.weight.grad == left
    for count in 5, 5.0, np.int64(5):  # of which the last two are no int
        with pytest.raises(UserError, match=r"returns 5(\.0)? as its count for 6 targets: return "):
            begin().loss(loss, count, True)
    for kinds in (6, torch.tensor(6)), (torch.tensor(6), 6):
        mean = begin()
        for kind in kinds:
            mean.loss(loss, kind, False)
        with pytest.raises(UserError, match="an int in some passes, not in others"):
            mean.finish(net, 2)


@SEGMENTATION
def test_losses_that_are_refused(project: Project) -> None:
    for line in project.call("criteria.refusals"):
        assert line.endswith(": use ce, focal, dice, lovasz or ce+0.5*dice"), line


def test_cross_entropy_of_no_flags(project: Project) -> None:
    total, torchs, count, is_same = project.call("criteria.plain_cross_entropy")
    assert (total, is_same) == (torchs, True)
    assert 0 < count <= 16 * 16 * 16


@CLASSIFICATION
def test_means_of_classification(project: Project) -> None:
    for name, (mean, expected) in project.call("criteria.of_classification").items():
        assert mean == pytest.approx(expected, rel=1e-5), name


@SEGMENTATION
def test_sums_of_segmentation(project: Project) -> None:
    """Of images that are void, in part, or lack a class; against plain loops and smp."""
    found = project.call("criteria.of_segmentation")
    combined, expected = found.pop("sum")
    assert combined == pytest.approx(expected, rel=1e-5)
    for name, each in found.items():
        total, loop, one_by_one = each["sums"]
        assert (loop, one_by_one) == pytest.approx((total, total), rel=1e-5), name
        assert each["counts"][0] == pytest.approx(each["counts"][1], rel=1e-6), name
        assert each["void"] == 0 < each["slopes"], name


@SEGMENTATION
def test_losses_of_extreme_outputs(project: Project) -> None:
    assert all(project.call("criteria.extreme_outputs"))


def test_gradients_of_other_portions(project: Project, tmp_path: Path) -> None:
    """1 x 16 images, 4 passes of 4, 2 ranks of 8, 2 ranks of 2 passes of 4: one gradient.

    With weights of classes, and void in some images more than in others; not so the mean of means.
    """
    far = project.call("criteria.in_portions", tmp_path)
    sizes = far.pop("size")
    for name, found in far.items():
        if name.endswith("means"):
            is_even = project.task == "classification" and "weights" not in name
            assert is_even or max(found) > 0.05, name
        elif name == "void":
            assert found == [0, 0, 0]
            assert sizes[name] == 0
        else:
            assert max(found) < 1e-5, name
            assert sizes[name] > 1e-3, name


def test_val_loss_on_any_batches(project: Project, tmp_path: Path) -> None:
    data = project.draw(tmp_path / "set", 6, 11)
    if project.task == "segmentation":
        spoil(data)
    count = 2 if project.task == "segmentation" else 6
    found = []
    for ranks in (1, 2):
        words = data, project.task, count
        out = project.fork(*words, script=SCRIPTS / "val_loss.py", ranks=ranks).ok().out
        found.append([json.loads(line) for line in out.splitlines() if line.startswith("[")])
    for one, two in zip(*found, strict=True):
        *words, values = one
        assert words == two[:-1]
        assert values + two[-1] == pytest.approx([values[0]] * 6, rel=1e-5), words


def spoil(data: Path) -> None:
    """Make some masks void in part or whole, and a pair smaller."""
    import numpy as np
    from PIL import Image

    for number, path in enumerate(sorted((data / "val" / "masks").iterdir())):
        mask = np.array(Image.open(path))
        mask[: 8 * number] = 255
        image_path = data / "val" / "images" / f"{path.stem}.jpg"
        side = 48 if number % 3 == 1 else 64
        Image.fromarray(mask[:side]).save(path)
        Image.open(image_path).crop((0, 0, 64, side)).save(image_path)


def test_eval_only_knows_the_loss(project: Project, tmp_path: Path) -> None:
    """And its flags: they are in the checkpoint."""
    data, out = project.draw(tmp_path / "set", 12, 7), tmp_path / "out"
    words = "--data", data, "--output-dir", out
    project.fork(*small(data), *words, *LOSS_FLAGS[project.task], draws=False).ok()
    said = project.alone(*words, "--eval-only", "--workers", 0, draws=False).ok().out
    val_loss = json.loads(said.splitlines()[-1])["val_loss"]
    assert val_loss == pytest.approx(float(rows(out)[0]["val_loss"]), rel=1e-3)
