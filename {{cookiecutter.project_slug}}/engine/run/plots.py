"""Plots of a run: curves.png, its metrics over the epochs, and examples.png, predictions."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from engine import files
from engine.data import loading
from engine.data.samples import KeyedDataset
from engine.run import metrics

Row = Mapping[str, float | str]
DrawExample = Callable[[Axes, Tensor, Tensor, Tensor, Sequence[str]], None]

NOT_DRAWN = {"epoch", "step", "lr", "img_per_s", "train_seconds", "data_wait"}


def draw_curves(path: Path, rows: Sequence[Row]) -> None:
    """Draw the losses on the left and the other metrics on the right, over the epochs."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, others = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in rows]
    for name, last in rows[-1].items():
        if name not in NOT_DRAWN and not isinstance(last, str):
            side = losses if name.endswith("loss") else others
            side.plot(epochs, [row.get(name, math.nan) for row in rows], marker=".", label=name)
    for side in losses, others:
        side.set_xlabel("epoch")
        side.xaxis.get_major_locator().set_params(integer=True)
        side.grid(alpha=0.3)
        side.legend()
    with files.writing(path) as tmp_path:
        figure.savefig(tmp_path, format="png", dpi=100)


@torch.inference_mode()
def draw_examples(
    path: Path, model: nn.Module, dataset: KeyedDataset, classes: Sequence[str], draw: DrawExample
) -> None:
    """Draw up to eight images, evenly spaced over `dataset`, each by the function `draw`."""
    device = next(model.parameters()).device
    picks = sorted({round(i * (len(dataset) - 1) / 7) for i in range(8)})
    columns = min(4, len(picks))
    rows = -(-len(picks) // columns)
    figure = Figure(layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    model.eval()
    for axes, index in itertools.zip_longest(grid.flat, picks):
        axes.axis("off")
        if index is None:
            continue
        image, target = dataset[0, index]  # of epoch 0
        # forward, because __call__ of a compiled network would compile again for one image.
        output = model.forward(loading.normalize(image[None].to(device)))
        output = metrics.check_logits(output)[0].cpu()
        draw(axes, image, torch.as_tensor(target), output, classes)
    height, width = grid[0, 0].images[0].get_size()
    figure.set_size_inches(3 * columns, rows * (3 * height / width + 0.4))
    with files.writing(path) as tmp_path:
        figure.savefig(tmp_path, format="png", dpi=100)
