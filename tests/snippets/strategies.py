"""Runs of the same training with DDP and with fully_shard, killed and resumed."""

from pathlib import Path

import torch
from digest import digest
from forked import run
from torch import nn

import dataset
import model
from ddpkit.run import metrics, sharded
from snippets.resume import killed_after


def blocks() -> None:
    """Shares small blocks out, too."""
    sharded.LARGE = 100_000


def precise() -> None:
    """In float64, in which rounding stays far from any step's effect."""
    blocks()
    torch.set_default_dtype(torch.float64)
    transform, infer = dataset.transform_batch, model.infer
    model.infer = lambda model, images, args: infer(model, images.double(), args)

    def in_double(images: torch.Tensor, *args: object) -> tuple:
        images, targets = transform(images, *args)
        return images.double(), targets

    dataset.transform_batch = in_double
    metrics.to_float32 = lambda outputs: outputs


def difference(first: Path, second: Path) -> float:
    """The norm of the difference of weights, moments, or validation losses, relative to theirs.

    The versions of modules have to be saved by both.
    """
    vectors, versions = [], []
    for path in (first, second):
        state = torch.load(path / "last.pt", weights_only=True)
        versions.append({m["version"] for m in state["model"]._metadata.values() if m})
        moments = [v for values in state["optimizer"]["state"].values() for v in values.values()]
        kept = [moment for moment in moments if moment is not None and moment.ndim]
        losses = [torch.tensor(row["val_loss"]) for row in state["history"]]
        each = [*state["model"].values()], kept, losses
        vectors.append([torch.cat([v.flatten().double() for v in values]) for values in each])
    assert versions[0] == versions[1] != set()
    pairs = zip(*vectors, strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


class Runs:
    def __init__(self, data: str, folder: str, words: tuple) -> None:
        self.folder, self.flags = Path(folder), ["--data", data, *words]

    def run(self, name: str, ranks: int, strategy: str, stop: int = 0, patch=precise) -> Path:
        """Start a run, or go on with it; with `stop` it is killed after that step."""
        out, said = self.folder / name, self.folder / f"{name}.said"
        more = *(["--fsdp"] if strategy == "fsdp" else []), "--output-dir", out
        end = killed_after(stop, patch) if stop else patch
        found = run(ranks, *self.flags, *more, patch=end, output=str(said), draws=False)
        assert found == [-9 if stop else 0] * ranks, Path(f"{said}.err").read_text()
        return out


def differences(data: str, folder: str, ranks: list[int], *words: object) -> list[float]:
    """Between DDP and fully_shard, on so many ranks."""
    each = Runs(data, folder, words).run
    return [difference(each(f"ddp{n}", n, "ddp"), each(f"fsdp{n}", n, "fsdp")) for n in ranks]


def resumed(data: str, folder: str, *words: object) -> dict:
    """Runs that are killed: with fully_shard alone, and with DDP and fully_shard in turn."""
    each = Runs(data, folder, (*words, "--save-every", 1)).run
    each("stop", 3, "fsdp", 3, blocks)
    whole = [each(name, 3, "fsdp", patch=blocks) for name in ("stop", "whole")]
    each("turns", 2, "ddp", 2)
    each("turns", 2, "fsdp", 5)
    turns = difference(each("turns", 2, "ddp"), each("ddp", 2, "ddp"))
    return {"digests": [*map(digest, whole)], "turns": turns}


class Block(nn.Module):
    def __init__(self, layer: nn.Module, mode: str) -> None:
        super().__init__()
        self.layer, self.mode = layer, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "weight":  # as attention does with its last layer
            return nn.functional.linear(x, self.layer.weight, self.layer.bias)
        x = self.layer(x)
        return self.layer(x) if self.mode == "twice" else x


def found_blocks() -> list[list[str]]:
    """The names of the blocks of small networks, by what is special about them."""
    sharded.LARGE = 12
    tied = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    tied[1][0].weight = tied[0].weight
    nets = [
        nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4)), nn.Linear(4, 2)),
        nn.Sequential(Block(nn.Linear(3, 3), "weight")),
        nn.Sequential(Block(nn.Linear(3, 3), "twice")),
        tied,
    ]
    found = []
    for net in nets:
        names = {module: name for name, module in net.named_modules()}
        found.append([names[block] for block in sharded.find_blocks(net, 3)])
    return found
