"""Reads all samples of a data set once, in parallel, and finds what only shows in all of them."""

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from engine.check.reading import PARTS, UNUSABLE, Facts, Finding, reason
from engine.data.samples import Packed
from engine.errors import UserError
from engine.ranks import process

Names = TypeVar("Names", bound=Sequence[str])  # of the classes

KEPT = 12  # samples of each class that may be drawn
IMBALANCE = 100  # times


def list_samples(
    root: Path,
    find_samples: Callable[[Path], tuple[list, list, Names]],
    find_all: Callable[[Path, list[Finding]], tuple[list, list, Names]],
) -> tuple[Packed, Names, list[Finding]]:
    """Return the samples with the numbers of their parts, the classes, and what is wrong with both.

    find_samples: of folders.py. find_all: the same for folders that it refuses.
    """
    findings: list[Finding] = []
    try:
        train, val, classes = find_samples(root)
    except UserError as error:
        train, val, classes = find_all(root, findings)
        if not train and not val:
            raise
        if not findings:
            findings.append(Finding("layout", str(root), reason(error, str(root))))
    parts = enumerate((train, val))
    return Packed([(*sample, n) for n, part in parts for sample in part]), classes, findings


class Survey:
    """What reading has shown of all samples, (path, class or mask, part): some bytes for each.

    sizes: int32 (samples, 2), heights and widths; 0 of those that training cannot use.
    pixels, images: int64 (2, values), of each class in each part. void: int64 (2,), pixels.
    """

    def __init__(
        self, samples: Packed, values: int, findings: list[Finding], has_masks: bool = False
    ) -> None:
        count = len(samples)
        self.samples = samples
        self.parts = np.zeros(count, np.uint8)
        self.sizes = np.zeros((count, 2), np.int32)
        self.digests = np.zeros((count, 3, 2), np.uint64)  # of file, pixels and target
        self.highest = np.full(count, -1, np.int16)  # class
        self.pixels, self.images = (np.zeros((2, values), np.int64) for _ in range(2))
        self.void = np.zeros(2, np.int64)
        self.histogram = np.zeros((3, 256), np.int64)  # of training images
        self.moments: np.ndarray | None = None  # instead, with "channels" in data.json
        self.kinds: Counter[str] = Counter()
        self.spans: dict[str, tuple[int, float, float]] = {}  # images, lowest, highest
        self.kept: dict[int, list[int]] = {}  # samples of each class, at random
        self.turned: list[int] = []  # samples with a doubtful rotation
        self.seconds = 0.0  # that `read` took
        self.random = random.Random(0)
        self.findings = findings
        self.root = ""  # of the data set
        self.has_masks = has_masks

    def read(self, dataset: Dataset, workers: int) -> None:
        """Read all samples: the items of `dataset`, which are Facts."""
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=process.worker_context(workers),
            worker_init_fn=process.start_worker,
        )
        start = time.perf_counter()
        bar = tqdm(loader, total=len(self.samples), unit="sample", disable=None)
        for index, facts in enumerate(bar):
            self.add(index, facts)
        self.seconds = time.perf_counter() - start

    def add(self, index: int, facts: Facts) -> None:
        part = self.parts[index] = self.samples[index][2]
        self.findings += facts.findings
        self.kinds[facts.kind or "unknown"] += 1
        if facts.span:
            count, low, high = self.spans.get(facts.kind, (0, np.inf, -np.inf))
            self.spans[facts.kind] = count + 1, min(low, facts.span[0]), max(high, facts.span[1])
        for column, found in enumerate((facts.file, facts.pixels, facts.target)):
            self.digests[index, column] = np.frombuffer(found or bytes(16), np.uint64)
        if part == 0 and facts.histogram is not None:
            self.histogram += facts.histogram
        if part == 0 and facts.moments is not None:
            self.moments = facts.moments + (0 if self.moments is None else self.moments)
        self.void[part] += facts.void
        self.highest[index] = max(facts.counts, default=-1)
        problems = {finding.kind for finding in facts.findings}
        if "rotation" in problems:
            self.turned.append(index)
        is_usable = not problems & UNUSABLE
        if is_usable:
            self.sizes[index] = facts.size
        for value, pixels in facts.counts.items():
            self.pixels[part, value] += pixels
            self.images[part, value] += 1
            if is_usable:
                self._keep(index, value, int(self.images[:, value].sum()))

    def _keep(self, index: int, value: int, count: int) -> None:
        """Keep some of the samples of a class, of which there have been `count`, at random."""
        kept = self.kept.setdefault(value, [])
        if len(kept) < KEPT:
            kept.append(index)
        elif (place := self.random.randrange(count)) < KEPT:
            kept[place] = index

    def usable(self, part: int) -> np.ndarray:
        """Return the numbers of the samples of a part that training can use."""
        return np.flatnonzero((self.parts == part) & (self.sizes[:, 0] > 0))

    def some(self, part: int, count: int = 64) -> list[tuple]:
        """Return up to `count` such samples, evenly spaced."""
        usable = self.usable(part)
        places = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
        return [self.samples[index] for index in usable[places]]

    def channels(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation per channel over all pixels of the training images, in 0..1."""
        if self.moments is not None:
            mean, square = self.moments[1:] / self.moments[0]
            return mean, np.sqrt(np.maximum(square - mean**2, 0))
        means, deviations = [], []
        for counts in self.histogram.tolist():  # integers, so exact until the division
            total = max(sum(counts), 1)
            first = sum(value * count for value, count in enumerate(counts))
            second = sum(value**2 * count for value, count in enumerate(counts))
            means.append(first / total / 255)
            deviations.append(math.sqrt(total * second - first**2) / total / 255)
        return np.array(means), np.array(deviations)

    def finish(self, classes: Sequence[str], root: Path) -> None:
        """Add what can only be found once all samples are read."""
        self.root = str(root)
        self.find_duplicates()
        self.find_rare(classes, self.root)

    def find_duplicates(self) -> None:
        """Add findings of images with equal pixels, each with the first that it equals."""
        for first, *others in equal_rows(self.digests[:, 1]):
            path = self.samples[first][0]
            same = (self.digests[others] == self.digests[first]).all(axis=2)
            known = self.digests[first, 2].any() & self.digests[others, 2].any(axis=1)
            for other, (file, _, target), is_known in zip(others, same, known, strict=True):
                is_leak = self.parts[other] != self.parts[first]
                kinds = ["leak"] if is_leak else []
                kinds += ["label clash"] if is_known and not target else []
                text = "the same file" if file else "the same pixels in another file"
                for kind in kinds or ["twice"]:
                    self.findings.append(Finding(kind, self.samples[other][0], text, path))

    def find_rare(self, classes: Sequence[str], root: str) -> None:
        """Add findings of classes that never come, or much more rarely than others in training."""
        for part in np.unique(self.parts):
            counts = self.images[part, : len(classes)]
            absent = [name for name, count in zip(classes, counts, strict=True) if not count]
            if 0 < len(absent) < len(counts):  # or nothing could be read
                names = f"{', '.join(absent[:10])}{', ...' if len(absent) > 10 else ''}"
                text = f"{len(absent)} of {len(classes)} never come in {PARTS[part]}: {names}"
                self.findings.append(Finding("absent", root, text))
        counts = self.images[0, : len(classes)]
        if len(some := counts[counts > 0]) and some.max() > IMBALANCE * some.min():
            rare, most = (
                classes[int(np.flatnonzero(counts == n)[0])] for n in (some.min(), some.max())
            )
            text = f"{rare} is in {some.min()} training images, {most} in {some.max()}"
            self.findings.append(Finding("imbalance", root, text))


def equal_rows(rows: np.ndarray) -> Iterator[list[int]]:
    """Yield the numbers of rows (N, 2) that equal one another, in order, without rows of zeros."""
    order = np.lexsort(rows.T)
    order = order[rows[order].any(axis=1)]
    changes = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    edges = np.flatnonzero(np.r_[True, changes, True][: len(order) + 1])
    for start, end in itertools.pairwise(edges):
        if end - start > 1:
            yield sorted(order[start:end].tolist())
