"""Files and folders that appear whole or not at all; what checkpoints hold of optimizers."""

import os
import signal

import pytest
import torch
from generated import refusal
from ranks import on_ranks

from ddpkit import files
from ddpkit.run import checkpoint


def test_writing(tmp_path):
    path = tmp_path / "new" / "file"
    with files.writing(path, parents=True) as part:
        part.write_text("one")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), files.writing(path) as part:
        part.write_text("two")
        raise ZeroDivisionError
    with refusal("files.failure", path, "No space"), files.writing(path) as part:
        part.write_text("three")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "one"
    assert os.listdir(path.parent) == ["file"]


def test_a_table(tmp_path):
    path, partial = tmp_path / "table.csv", tmp_path / "table.csv.partial"
    with files.table(path, ["file"]):
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError), files.table(path, ["file"]) as write:
        write(["\udcff"])
        raise ZeroDivisionError
    assert partial.read_bytes() == b"file\n\xff\n"
    with files.table(path, ["file"]) as write:
        write(["a"])
    assert path.read_text() == "file\na\n" and not partial.exists()


def test_filling(tmp_path):
    """A folder appears whole or not at all; the first one stays."""
    folder = tmp_path / "folder"
    if not (pid := os.fork()):
        with files.filling(folder) as part:
            (part / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not folder.exists()
    with pytest.raises(ZeroDivisionError), files.filling(folder) as part:
        raise ZeroDivisionError
    (left,) = tmp_path.iterdir()  # of the one that was killed
    for name in ("first", "second"):
        with files.filling(folder) as part:
            (part / name).touch()
    assert {*tmp_path.iterdir()} == {left, folder} and os.listdir(folder) == ["first"]


@on_ranks(1)
def test_groups_of_an_optimizer():
    """In another order they resume, each weight with its own moment."""
    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(3, 1, bias=False)

    def made(*groups: list[torch.Tensor]) -> dict:
        sgd = torch.optim.SGD([{"params": group} for group in groups], 0.1, 0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
        return {"model": net, "optimizer": sgd, "scheduler": scheduler}

    before = made([net.weight, net.bias, other.weight])
    net(torch.ones(2)).sum().backward()
    before["optimizer"].step()
    state = {**checkpoint.take_states(before), "kinds": checkpoint.kinds(before), "path": "last.pt"}
    named = state["optimizer"]["param_groups"][0]["params"]
    assert named == ["weight", "bias", "2 (1, 3)"]  # the last is none of the model's
    after = made([net.bias, net.weight, other.weight])
    checkpoint.load_states(state, after, 1)
    for weight in net.parameters():
        moments = (each["optimizer"].state[weight] for each in (before, after))
        assert torch.equal(*(moment["momentum_buffer"] for moment in moments))


@on_ranks(1)
def test_another_memory_format():
    """A fused optimizer takes the order in memory for granted; other moments are put right."""
    last = torch.channels_last
    weight, mean, square, grad = (torch.rand(4, 3, 3, 3) for _ in range(4))
    ends = []
    for fused in (True, False):
        w = torch.nn.Parameter(weight.contiguous(memory_format=last))
        optimizer = torch.optim.AdamW([w], 0.1, fused=fused)
        parts = {
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        }
        state = {**checkpoint.take_states(parts), "path": "last.pt"}
        moments = {"exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
        moments["step"] = torch.tensor(3.0)
        state["optimizer"]["state"] = {"0 (4, 3, 3, 3)": moments}
        state["kinds"] = checkpoint.kinds(parts)
        checkpoint.load_states(state, parts, 3)
        w.grad = grad.contiguous(memory_format=last)
        optimizer.step()
        ends.append(w.detach())
    assert torch.allclose(*ends, atol=1e-6)
