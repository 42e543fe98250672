"""What the model gets wrong: the worst images, and the numbers of each class."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import IterableDataset

from ddpkit import files
from ddpkit.data import images, normalizing, samples
from ddpkit.data.samples import Key, Seeded
from ddpkit.ranks import distributed, stopping
from ddpkit.run import pictures
from ddpkit.run.outputs import Outputs, to_logits
from ddpkit.run.pictures import DrawExample

Worsts = Sequence[tuple[float, int]]  # (loss, index) of images, what TopLosses finds

COUNT = 12  # images in worst.png
EXAMPLES = 8  # in examples.png
IGNORED = -100  # cross_entropy leaves this label out


class TopLosses:
    """The images with the greatest losses so far, on this rank; `compute` joins the ranks'.

    The loss of an image is the cross-entropy of its label, or the mean of that over its labelled
    pixels, or over its labels, float (classes,) from 0 to 1. With other targets none is found.

        worst = ddpkit.TopLosses(device)
        worst.update(logits, targets, indices)  # of each batch
        pairs = worst.compute()
    """

    def __init__(self, device: torch.device) -> None:
        # float32, of up to COUNT images, and which images these are
        self.losses = torch.empty(0, device=device)
        self.indices = torch.empty(0, dtype=torch.int64, device=device)
        self.are_labels = torch.ones((), dtype=torch.bool, device=device)

    def update(self, outputs: Tensor, targets: Tensor, indices: Tensor) -> None:
        """Take logits (N, classes, ...), targets int64 (N, ...) and the images' indices (N,)."""
        if targets.is_floating_point():
            if targets.shape != outputs.shape:
                return
            # Regression has targets of this shape, too: it shows by numbers beyond 0 and
            # 1 or, with a single output, between them.
            fits = (targets >= 0) & (targets <= 1)
            if targets.shape[1:] == (1,):
                fits = (targets == 0) | (targets == 1)
            self.are_labels &= fits.all()
            is_class = torch.ones_like(targets)
            losses = binary_cross_entropy_with_logits(
                outputs, targets, reduction="none"
            )
        else:
            without_classes = outputs.shape[:1] + outputs.shape[2:]
            if outputs.ndim < 2 or targets.shape != without_classes:
                return
            is_class = (targets >= 0) & (targets < outputs.shape[1])
            labels = targets.where(is_class, IGNORED)
            losses = cross_entropy(
                outputs, labels, ignore_index=IGNORED, reduction="none"
            )
        # the mean of each image, over what has a label; images without any come last
        total = losses.reshape(len(losses), -1).sum(1)
        count = is_class.reshape(len(losses), -1).sum(1)
        means = (total / count).where(count > 0, -math.inf)
        losses = torch.cat([self.losses, means])
        indices = torch.cat([self.indices, indices])
        # By index, then stably by loss: of equal losses the same are kept on any number
        # of ranks.
        order = indices.argsort()
        order = order[losses[order].argsort(descending=True, stable=True)][:COUNT]
        self.losses = losses[order]
        self.indices = indices[order]

    def compute(self) -> list[tuple[float, int]]:
        """Return (loss, index) of the worst images of all ranks; every rank has to call it."""
        stopping.agree()
        pairs = list(zip(self.losses.tolist(), self.indices.tolist(), strict=True))
        mine = pairs, bool(self.are_labels)
        found = []
        for pairs, are_labels in distributed.gather_objects(mine):
            if not are_labels:
                return []
            found += [pair for pair in pairs if pair[0] != -math.inf]
        # NaN before all numbers
        found.sort(key=lambda pair: (not math.isnan(pair[0]), -pair[0], pair[1]))
        return found[:COUNT]


@dataclass
class Mistakes:
    """What `evaluate` has found, to be drawn: images only with `draw`, none of a stream."""

    confusion: Tensor | None
    worst: Worsts
    model: nn.Module
    loader: Any
    classes: Sequence[str]
    predict: Callable[[nn.Module, Tensor], Outputs]
    draw: DrawExample | None

    @torch.inference_mode()
    def draw_examples(
        self, path: Path, captions: Mapping[int, str] | None = None
    ) -> None:
        """Draw images by index, with their file and caption; by default some, without any."""
        data = getattr(self.loader, "dataset", None)
        if not self.draw or data is None or isinstance(data, IterableDataset):
            return
        if not isinstance(data, Seeded):
            data = Seeded(data, self.classes, 0)
        if not captions:
            # from the first to the last, at equal distances; fewer if there are fewer
            gap = (len(data) - 1) / (EXAMPLES - 1)
            captions = {round(i * gap): "" for i in range(EXAMPLES)}
        format = normalizing.format_of(self.loader)
        device = next(self.model.parameters()).device
        examples = []
        for index, caption in captions.items():
            image, target = data[Key(0, index, is_val=True)][:2]
            batch = normalizing.normalize_images(image[None].to(device), format)
            logits = to_logits(self.predict(self.model, batch))[0].cpu()
            above = []
            if caption:
                # of "sample 7, ROOT/FOLDER/FILE" the end tells enough
                file = Path(samples.name(data.dataset, index).split(", ", 1)[-1])
                above = [str(Path(*file.parts[-2:])), caption]
            shown = images.visible(image)
            examples.append((shown, torch.as_tensor(target), logits, above))
        pictures.draw_images(path, examples, self.draw, self.classes)

    def write_files(self, folder: Path) -> None:
        """Write the files for which there is something to `folder`."""
        if self.confusion is not None:
            write_per_class(folder / "per_class.csv", self.confusion, self.classes)
            if self.confusion.ndim == 2:
                pictures.draw_confusion(
                    folder / "confusion.png", self.confusion, self.classes
                )
        captions = {}
        for loss, index in self.worst:
            if index >= 0:  # another loader may not say which images they were
                captions[index] = f"loss {loss:.3g}"
        if captions:
            self.draw_examples(folder / "worst.png", captions)


def write_per_class(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Write precision, recall, F1, IoU and number of labels of each class; 0 / 0 is nan."""
    counts = confusion.cpu().double()
    # of several labels per image: (classes, not there or there, not said or said)
    if counts.ndim == 3:
        right = counts[:, 1, 1]
        labels = counts[:, 1].sum(1)
        predictions = counts[:, :, 1].sum(1)
    else:
        right = counts.diagonal()
        labels = counts.sum(1)
        predictions = counts.sum(0)
    both = labels + predictions
    shares = [
        right / predictions,
        right / labels,
        2 * right / both,
        right / (both - right),
    ]
    columns = ["class", "precision", "recall", "f1", "iou", "support"]
    with files.table(path, columns) as write:
        for i, (name, support) in enumerate(zip(classes, labels, strict=True)):
            row = [f"{share[i]:.6f}" for share in shares]
            write([name, *row, int(support)])
