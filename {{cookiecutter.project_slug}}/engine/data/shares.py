"""The line about the classes' shares of a data set, which is printed before training."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from engine.errors import shorten
from engine.ranks import distributed

ALL_NAMED = 12  # with more classes, only the largest and the smallest are named
CHUNK = 16  # masks that are read at once, by THREADS threads
THREADS = 8  # each with a few copies of a mask in memory
MOST_PIXELS = 2**27  # of the masks; reading PNGs of so many takes 1 to 3 s on 2 CPUs


@dataclass
class Pixels:
    """How many pixels each class number has in some masks: counts, int64 (256,)."""

    counts: np.ndarray
    read: int  # masks
    total: int

    def __str__(self) -> str:
        return f"{self.read} of {self.total}" if self.read < self.total else str(self.total)


def count_pixels(
    read: Callable[[int], np.ndarray], total: int, void: int, most: int = 0, classes: int = 0
) -> Pixels:
    """Count the pixels in `most` of `total` masks (0: in all), in random order.

    read: index -> mask, uint8 (H, W). Of large masks fewer are read, but as many as it takes to
    find `classes` classes.
    """
    found = Pixels(np.zeros(256, np.int64), 0, total)
    order = np.random.default_rng(0).permutation(total)
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, total, CHUNK):
            chunk = order[start : start + CHUNK].tolist()
            for counts in pool.map(lambda index: histogram(read(index)), chunk):
                found.counts += counts
            found.read += len(chunk)
            is_enough = most and (found.read >= most or found.counts.sum() > MOST_PIXELS)
            if is_enough and np.count_nonzero(np.delete(found.counts, void)) >= classes:
                break
            if is_enough and start == 1024:
                distributed.say(f"one class in {found.read} training masks, reading the rest")
    return found


def histogram(mask: np.ndarray) -> np.ndarray:
    return np.array(Image.fromarray(mask).histogram())  # np.bincount takes five times as long


def say_pixels(classes: Sequence[str], train: Pixels, val: Pixels, void: int) -> None:
    """Print the share of the pixels that each class has; warn of classes without any."""
    parts = {"training": train, "validation": val}
    known = [part.counts[: len(classes)] for part in parts.values()]
    each = [[percent(n, counts.sum()) for n in counts] for counts in known]
    texts = [f"{share} ({other})" for share, other in zip(*each, strict=True)]
    if any(part.counts[void] for part in parts.values()):
        voids = [percent(part.counts[void], part.counts.sum()) for part in parts.values()]
        tail = f"; void {voids[0]} ({voids[1]})"
    else:
        tail = ""
    head = f"in % of the pixels of {train} training masks ({val} validation masks)"
    say_line(head, classes, known[0], texts, tail)
    for (kind, part), counts in zip(parts.items(), known, strict=True):
        read = " read; check_data.py reads all" if part.read < part.total else ""
        warn(classes, counts, f"none of the {part} {kind} masks{read}")


def say_images(classes: Sequence[str], train: Sequence[int], val: Sequence[int]) -> None:
    """Print how many images each class has, by the samples' labels; warn of classes without any.

    Says nothing if a label is no class number.
    """
    counts = []
    for labels in train, val:
        counted = Counter(labels)
        if not set(counted) <= set(range(len(classes))):
            return
        counts.append(np.array([counted[number] for number in range(len(classes))]))
    texts = [f"{n} ({other})" for n, other in zip(*counts, strict=True)]
    say_line("images for training (validation)", classes, counts[0], texts)
    for kind, each in zip(("training", "validation"), counts, strict=True):
        warn(classes, each, f"none of the {kind} images")


def say_line(
    head: str, classes: Sequence[str], sizes: np.ndarray, texts: Sequence[str], tail: str = ""
) -> None:
    """Print all classes in their order, or the three largest and smallest of many."""
    names = [f"{name}:" if name.isdecimal() else name for name in classes]

    def listed(numbers: Iterable[int]) -> str:
        return ", ".join(f"{names[n]} {texts[n]}" for n in numbers)

    if len(classes) <= ALL_NAMED:
        return distributed.say(f"classes, {head}: {listed(range(len(classes)))}{tail}")
    order = np.argsort(-sizes, kind="stable").tolist()
    ends = f"largest {listed(order[:3])}; smallest {listed(order[-3:])}"
    distributed.say(f"{len(classes)} classes, {head}: {ends}{tail}")


def percent(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    return f"{share:.1f}" if share >= 0.1 or not share else f"{share:.1g}"


def warn(classes: Sequence[str], counts: np.ndarray, where: str) -> None:
    if lacking := [name for name, count in zip(classes, counts, strict=True) if not count]:
        some = f"{len(lacking)} classes, " if len(lacking) > 4 else ""
        verb = "is" if len(lacking) == 1 else "are"
        distributed.say(f"warning: {some}{shorten(lacking)} {verb} in {where}")
