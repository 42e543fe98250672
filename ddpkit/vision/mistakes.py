"""What the model gets wrong: the worst images, and the numbers of each class."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import IterableDataset

from ddpkit import files
from ddpkit.data import normalizing, samples
from ddpkit.data.samples import Key, MapDataset, Seeded
from ddpkit.errors import shorten
from ddpkit.ranks import distributed, replicas, stopping
from ddpkit.run.outputs import Outputs, to_logits
from ddpkit.vision import images, lists, pictures
from ddpkit.vision.pictures import DrawExample, Example
from ddpkit.vision.rows import as_digits, clip, clip_middle, table_lines

# what TopLosses finds: (loss, index) of images, or, of every one, what `judge` returns, too
Worsts = Sequence[tuple]
Predict = Callable[[nn.Module, Tensor], Outputs]  # of a batch of images

COUNT = 12  # images in worst.png
EXAMPLES = 8  # in examples.png
MEASURES = ("precision", "recall", "f1", "iou")
MOST_LINES = 50  # classes in a printed table
FEW_LINES = 20  # of more classes
IGNORED = -100  # cross_entropy leaves this label out


class TopLosses:
    """The images with the greatest losses so far, on this rank; `compute` joins the ranks'.

    The loss of an image is the cross-entropy of its label, or the mean of that over its labelled
    pixels, or over its labels, float (classes,) from 0 to 1. With other targets none is found.
    every: also note what is predicted of each image, for predictions.csv.

        worst = ddpkit.TopLosses(device)
        worst.update(logits, targets, indices)  # of each batch
        pairs = worst.compute()
    """

    def __init__(self, device: torch.device, every: object = False) -> None:
        self.every = every
        self.noted: list[list[Tensor]] = []  # of each batch
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
        # the mean of each image, over what has a label; -inf without any
        total = losses.reshape(len(losses), -1).sum(1)
        count = is_class.reshape(len(losses), -1).sum(1)
        means = (total / count).where(count > 0, -math.inf)
        batch = [means, indices]
        if self.every:
            batch += judge(outputs, targets, is_class)
        self.noted.append(batch)

    def compute(self) -> list[tuple[float, int]]:
        """Return (loss, index) of the worst images of all ranks; every rank has to call it.

        With `every` of all images, each with its label and probabilities, NumPy's.
        """
        stopping.agree()
        mine: list[tuple] = []
        if self.noted:
            # at once: each that is read from a GPU waits for it
            losses, indices, *more = map(torch.cat, zip(*self.noted, strict=True))
            parts = [each.numpy() for each in more]
            mine += zip(losses.tolist(), indices.tolist(), *parts, strict=True)
        found: list[tuple] = []
        of_ranks = distributed.gather_objects(
            (self._worst(mine), bool(self.are_labels))
        )
        for rows, are_labels in of_ranks:
            if not are_labels:
                return []
            found += rows
        return self._worst(found)

    def _worst(self, rows: list[tuple]) -> list[tuple]:
        rows = [row for row in rows if row[0] != -math.inf]
        # NaN before all numbers; of equal losses the same on any number of ranks
        rows.sort(key=lambda row: (not math.isnan(row[0]), -row[0], row[1]))
        return rows if self.every else rows[:COUNT]


def judge(outputs: Tensor, targets: Tensor, is_class: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each image in a batch its label, or labels, and the probabilities (N, classes).

    Of masks, in place of both: how many pixels have the label, are predicted as it, and both, of
    each class, int64 (N, 3, classes), without void.
    """
    if targets.is_floating_point():
        return targets.cpu(), outputs.float().sigmoid().cpu()
    if targets.ndim == 1:
        return targets.cpu(), outputs.float().softmax(1).cpu()
    classes = outputs.shape[1]
    pairs = (targets * classes + outputs.argmax(1)).cpu()
    areas = []
    for pair, is_labelled in zip(pairs, is_class.cpu(), strict=True):
        counts = pair[is_labelled].bincount(minlength=classes**2)
        confusion = counts.view(classes, classes)
        sums = confusion.sum(1), confusion.sum(0), confusion.diagonal()
        areas.append(torch.stack(sums))
    of_images = torch.stack(areas)
    return of_images, of_images


@dataclass
class Mistakes:
    """Draws what a network gets wrong: images only with `draw`, none of a stream."""

    model: nn.Module
    loader: object
    classes: Sequence[str]
    predict: Predict
    draw: DrawExample | None

    @torch.inference_mode()
    def draw_examples(
        self, path: Path, captions: Mapping[int, str] | None = None
    ) -> list[Example]:
        """Draw images by index, with their file and caption, and return them; by default some.

        They are none of a stream, or without `draw`.
        """
        data = getattr(self.loader, "dataset", None)
        if not self.draw or data is None or isinstance(data, IterableDataset):
            return []
        data = getattr(self.loader, "seeded", None) or Seeded(data, self.classes, 0)
        captions = captions or dict.fromkeys(spread(len(data), EXAMPLES), "")
        format = normalizing.format_of(self.loader)
        device = next(self.model.parameters()).device
        names = short_names(data.dataset, captions)
        examples: list[Example] = []
        for name, (index, caption) in zip(names, captions.items(), strict=True):
            image, target = data[Key(0, index, is_val=True)][:2]
            batch = normalizing.normalize_images(image[None].to(device), format)
            with replicas.in_evaluation(self.model):
                logits = to_logits(self.predict(self.model, batch))[0].cpu()
            above = [line for line in (name, caption) if line]
            shown = images.visible(image)
            examples.append((shown, torch.as_tensor(target), logits, above))
        pictures.draw_images(path, examples, self.draw, self.classes)
        return examples

    def write_files(
        self, folder: Path, confusion: Tensor | None, worst: Worsts
    ) -> None:
        """Write the files for which there is something to `folder`."""
        if confusion is not None:
            write_per_class(folder / "per_class.csv", confusion, self.classes)
            if confusion.ndim == 2:
                path = folder / "confusion.png"
                pictures.draw_confusion(path, confusion, self.classes)
        # another loader may not say which images they were
        shown = [each[:2] for each in worst[:COUNT]]
        losses = {index: f"{loss:.4g}" for loss, index in shown if index >= 0}
        if not losses:
            return
        numbered = enumerate(losses.items(), 1)
        captions = {index: f"{n}.  loss {loss}" for n, (index, loss) in numbered}
        examples = self.draw_examples(folder / "worst.png", captions)
        # the files that worst.png shows, in its order
        columns = ["path", "label", "prediction", "loss"]
        with files.table(folder / "worst.csv", columns) as write:
            for index, (_, target, logits, _) in zip(losses, examples, strict=False):
                words = self._in_words(target, logits)
                write([self._name(index), *words, losses[index]])

    def _name(self, index: int) -> str:
        data = samples.dataset_of(self.loader)
        return samples.file_of(data, index) or samples.name(data, index)

    def write_predictions(self, folder: Path, every: Worsts) -> dict[str, float]:
        """Write a row for `every` image; of several labels also their best thresholds.

        Returns the calibration error.
        """
        # its import takes seconds
        from ddpkit.vision.metrics import best_threshold, calibration_error

        every = sorted(every, key=lambda each: each[1])
        _, _, labels, scores = map(
            torch.as_tensor, map(np.stack, zip(*every, strict=True))
        )
        is_mask = scores.ndim == 3
        columns = ["path", "label", "prediction", "loss"]
        parts = ["probability"]
        if is_mask:
            columns = ["path", "loss"]
            parts = ["label_pixels", "predicted_pixels", "right_pixels"]
        columns += [f"{part}_{name}" for part in parts for name in self.classes]
        with files.table(folder / "predictions.csv", columns) as write:
            for (loss, index, *_), label, row in zip(
                every, labels, scores, strict=True
            ):
                # another loader may not say which image it is
                words = [self._name(index) if index >= 0 else ""]
                if not is_mask:
                    words += self._in_words(label, row - 0.5)
                # nine digits are all of a float32
                write([*words, *[f"{x:.9g}" for x in (loss, *row.flatten().tolist())]])
        if is_mask:
            return {}
        if labels.ndim == 2:
            path = folder / "thresholds.csv"
            with files.table(path, ["class", "threshold", "f1"]) as write:
                for name, *pair in zip(
                    self.classes, scores.T, labels.int().T, strict=True
                ):
                    if pair[1].any():
                        write([name, *best_threshold(*pair)])
        return {"ece": calibration_error(scores, labels)}

    def _in_words(self, target: Tensor, logits: Tensor) -> list[str]:
        """Return label and prediction; of a mask the classes' shares of its labelled pixels."""
        if target.is_floating_point():  # several labels
            labels = [(target > 0.5).nonzero(), (logits > 0).nonzero()]
        else:
            is_label = (target >= 0) & (target < len(logits))
            labels = [target[is_label], logits.argmax(0)[is_label]]
        said = []
        for numbers in labels:
            words = []
            for number in numbers.unique().tolist():
                word = self.classes[number]
                if target.ndim > 1:
                    share = (numbers == number).double().mean()
                    word += f" {100 * share:.3g}%"
                words.append(word)
            said.append("; ".join(words))
        return said


def spread(total: int, count: int) -> list[int]:
    """Return `count` numbers of samples, from the first to the last; fewer if there are fewer."""
    gap = (total - 1) / (count - 1)
    return sorted({round(i * gap) for i in range(count)})


def short_names(dataset: MapDataset, indices: Iterable[int]) -> list[str]:
    """Return the files of samples, from the folder that all of them share, for a picture."""
    every = [samples.file_of(dataset, index) for index in indices]
    folders = [os.path.dirname(os.path.abspath(path)) for path in every if path]
    root = os.curdir
    with contextlib.suppress(ValueError):  # there are none, or they are on two drives
        root = os.path.commonpath(folders)
    return [clip_middle(path and os.path.relpath(path, root)) for path in every]


def per_class(confusion: Tensor) -> Tensor:
    """Return MEASURES and the number of labels of each class, (classes, 5); 0 / 0 is NaN."""
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
    columns = [
        right / predictions,
        right / labels,
        2 * right / both,
        right / (both - right),
        labels,
    ]
    return torch.stack(columns, dim=1)


def write_per_class(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Write the numbers of `per_class` as a table."""
    with files.table(path, ["class", *MEASURES, "support"]) as write:
        for name, row in zip(classes, per_class(confusion).tolist(), strict=True):
            *shares, support = row
            write([name, *[f"{share:.6f}" for share in shares], int(support)])


def say_weak(folder: Path, results: Mapping[str, float]) -> None:
    """Print which classes are never predicted, by per_class.csv, and which score is a guess's."""
    path = folder / "per_class.csv"
    if not path.is_file():
        return
    rows = [row for _, row in lists.read_rows(path) if row["support"] != "0"]
    never = [row["class"] for row in rows if row["precision"] == "nan"]
    if never:
        distributed.print0(f"never predicted: {shorten(never)}")
    supports = [int(row["support"]) for row in rows]
    most = max(supports)
    usual = rows[supports.index(most)]["class"]
    share = most / sum(supports)
    for name, guess in {"top1": share, "miou": share / len(rows)}.items():
        if results.get(name, math.inf) <= guess + 1e-6:
            distributed.print0(
                f"no better than a guess: always answering {usual} has {name} {guess:.4f}"
            )


def per_class_lines(
    confusion: Tensor, classes: Sequence[str], images: int | None
) -> list[str]:
    """Return the numbers of `per_class` as lines to print, and their means.

    images: how many were evaluated. Of many classes they are those with the lowest F1.
    """
    table = per_class(confusion)
    means = table.nanmean(0)
    means[-1] = table[:, -1].sum()
    # of several labels per image there is no matrix of two sides
    is_of_images = confusion.ndim == 3 or images is None or means[-1] <= images
    unit = "images" if is_of_images else "pixels"
    shown = MEASURES[:3] if is_of_images else MEASURES
    numbers = list(range(len(classes)))
    if len(classes) > MOST_LINES:
        # NaN, which sorts after all numbers, is of classes that are nowhere
        numbers = table[:, 2].argsort(stable=True)[:FEW_LINES].tolist()
    names = [*(classes[number] for number in numbers), "mean, sum"]
    cells = []
    for name, row in zip(names, [*table[numbers], means], strict=True):
        *shares, support = row.tolist()
        digits = [as_digits(share) for share in shares[: len(shown)]]
        cells.append([clip(name), f"{support:,.0f}", *digits])
    lines = table_lines(["class", unit, *shown], cells)
    if len(numbers) < len(classes):
        lines.append(
            f"these are the {len(numbers)} of {len(classes)} classes with the lowest f1; "
            "per_class.csv has all"
        )
    return lines
