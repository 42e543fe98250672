"""Runs of the same training with DDP and with fully_shard, in float64."""

from pathlib import Path

import torch
from forked import run

import dataset
import model
from engine.run import machine, sharded


def precise() -> None:
    """In float64, in which rounding stays far from any step's effect; with many blocks."""
    torch.set_default_dtype(torch.float64)
    transform, infer = dataset.transform_batch, model.infer
    model.infer = lambda model, images, args: infer(model, images.double(), args)

    def in_double(images: torch.Tensor, *args: object) -> tuple:
        images, targets = transform(images, *args)
        return images.double(), targets

    dataset.transform_batch = in_double
    machine.to_float32 = lambda outputs: outputs
    sharded.LARGE = 20_000


def difference(first: Path, second: Path) -> float:
    """The greatest difference of weights and moments, relative to the greatest value of each."""
    states = [torch.load(path / "last.pt", weights_only=True) for path in (first, second)]
    assert states[0]["layout"] == states[1]["layout"]
    tensors = []
    for state in states:
        moments = state["optimizer"]["state"]
        found = {f"{n} {k}": v for n, values in moments.items() for k, v in values.items()}
        tensors.append({**state["model"], **{k: v for k, v in found.items() if v is not None}})
    assert tensors[0].keys() == tensors[1].keys()
    pairs = [(value.double(), tensors[1][name].double()) for name, value in tensors[0].items()]
    return max(float((a - b).abs().max() / (b.abs().max() + 1e-30)) for a, b in pairs)


def differences(data: str, folder: str, ranks: list[int], *words: object) -> list[float]:
    """Between DDP and fully_shard, on so many ranks."""
    found = []
    for count in ranks:
        paths = [Path(folder, f"{strategy}{count}") for strategy in ("ddp", "fsdp")]
        for path in paths:
            more = "--strategy", path.name[:-1], "--output-dir", path
            said = run(count, "--data", data, *more, *words, patch=precise, output=f"{path}.said")
            assert said == [0] * count, Path(f"{path}.said.err").read_text()
        found.append(difference(*paths))
    return found
