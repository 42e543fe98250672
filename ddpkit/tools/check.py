"""Check a data set before training: python -m ddpkit check DIR

Reads every file once, and prints what is in them and all that is wrong with them.

The exit status is 1 if there are errors: files that cannot be read, images without masks and masks
without images, sizes that differ, values that are no class, images that need another value_range in
data.json, or that are in train and in val; not for warnings: images that come twice in a part, or
that EXIF turns beside their masks.
Whatever else training refuses is told in one line, with status 2.
"""

import hashlib
import json
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from ddpkit.data import folders, loading
from ddpkit.data.format import NAME, Format, read_format, write_format
from ddpkit.data.masks import VOID, Labels, Meant, agree, explain_values, read_classes
from ddpkit.data.samples import MapDataset
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed, process
from ddpkit.run import machine
from ddpkit.run.flags import Parser, at_least

PARTS = ("train", "val")


@dataclass
class Facts:
    """What reading a sample has shown, without its pixels."""

    error: str = ""  # why training cannot use it; then the rest is empty
    size: tuple[int, int] = (0, 0)  # height and width, upright
    pixels: str = ""  # a digest of the image
    # pixels of each mask value, or {class: 1}
    counts: dict[int, int] = field(default_factory=dict)
    meant: Meant = field(default_factory=dict)  # of the values in a mask
    is_turned: bool = False  # an image beside a mask
    # with "channels", (3, channels): pixels, sums of values 0 to 1, of squares
    moments: Any = 0.0


def look(key: Any) -> Facts:
    """Read a sample; key: its part, ImageFiles or MaskFiles, and its number there."""
    part, index = key
    part.labels.meant = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about files that it can read
        try:
            image, *masks = part.open(index)
            seen = image.decode(1)
        # Pillow raises errors of many kinds for malformed files
        except Exception as error:
            return Facts(
                getattr(error, "line", "") or f"{part.samples[index][0]}: {error!r}"
            )
    digest = hashlib.blake2b(np.ascontiguousarray(seen).data, digest_size=8).hexdigest()
    facts = Facts("", (image.height, image.width), f"{seen.shape} {digest}")
    facts.counts = {} if masks else part.count_labels(index)
    facts.meant, facts.is_turned = part.labels.meant, bool(masks) and image.is_turned
    for mask in masks:
        found = np.unique(mask.decode(1), return_counts=True)
        facts.counts = dict(zip(*(each.tolist() for each in found), strict=True))
    if channels := part.format.channels:
        flat = seen.reshape(-1, channels)
        sums = flat.sum(0, np.float64), np.square(flat).sum(0, np.float64)
        facts.moments = np.stack([np.full(channels, len(flat)), *sums])
    return facts


class Survey:
    """What all samples of the two parts have shown."""

    def __init__(self, parts: Sequence[MapDataset], workers: int) -> None:
        self.errors, self.warnings = list[str](), list[str]()
        self.sizes: tuple[list, list] = ([], [])
        # by part and class number
        self.pixels, self.images = np.zeros((2, 2, 2**16), np.int64)
        self.moments: Any = 0.0  # of training images
        meant: Meant = {}
        turned: list[str] = []
        mixed = ""
        first: dict[str, tuple[int, str]] = {}  # part and path, by the pixels' digest
        keys: MapDataset = [
            (part, index) for part in parts for index in range(len(part))
        ]
        options = loading.workers(workers, torch.device("cpu"))
        loader: DataLoader = DataLoader(keys, None, collate_fn=look, **options)
        for (part, index), facts in zip(
            keys, tqdm(loader, unit="sample", disable=None), strict=True
        ):
            number, path = parts.index(part), part.samples[index][0]
            if facts.error:
                self.errors.append(facts.error)
                continue
            self.sizes[number].append(facts.size)
            turned += [path] * facts.is_turned
            try:
                agree(meant, facts.meant)
            except UserError as error:
                mixed = mixed or error.line  # one for the whole set
            self.moments += 0.0 if number else facts.moments
            for value, pixels in facts.counts.items():
                self.pixels[number, value] += pixels
                self.images[number, value] += 1
            other, copy = first.setdefault(facts.pixels, (number, path))
            if other != number:
                self.errors.append(f"{path}: the same image is in train, {copy}")
            elif copy != path:
                self.warnings.append(f"{path}: the same image as {copy}")
        self.errors += [mixed] * bool(mixed)
        if turned:
            line = f"{turned[0]}: EXIF turns this image and {len(turned) - 1} others"
            self.warnings.append(f"{line}; their masks have to be upright")

    def name_classes(self, labels: Labels, root: Path) -> list[str]:
        """Return the classes of masks; add an error of too few, or of numbers in val alone."""
        used, others = (np.flatnonzero(counts).tolist() for counts in self.images)
        numbers = [number for number in used if number != VOID]
        classes = labels or [
            str(number) for number in range(max(numbers, default=-1) + 1)
        ]
        # no mask could be read
        text = explain_values(used, bool(labels)) if used else ""
        unknown = [str(value) for value in others if len(classes) <= value < VOID]
        if unknown and not text:
            text = f"validation masks have {shorten(unknown)}, no training mask has"
        self.errors += [f"{root}: {text}"] if text else []
        return classes

    def propose(self, format: Format) -> Format:
        """Return what data.json should say: with mean and deviation, if images have "channels"."""
        if not isinstance(self.moments, np.ndarray):
            return format
        mean, square = self.moments[1:] / self.moments[0]
        std = np.sqrt(np.maximum(square - mean**2, 0))
        means, deviations = ([float(f"{x:.5g}") for x in each] for each in (mean, std))
        return replace(
            format, mean=tuple(means), std=tuple(x or 1.0 for x in deviations)
        )

    def describe(self, names: dict[int, str], has_masks: bool) -> Iterator[str]:
        """Yield the lines about sizes, and one for each class, by its number."""
        for part, sizes in zip(PARTS, self.sizes, strict=True):
            used = sorted(sizes, key=math.prod)
            ends = dict.fromkeys(
                f"{width} x {height}" for height, width in used[:1] + used[-1:]
            )
            yield f"{part:10}{len(used)} images; width x height: {' to '.join(ends) or 'none'}"
        what = "pixels" if has_masks else "images"
        yield f"classes   images, and share of the {what}, in train and in val"
        totals, width = (
            np.maximum(self.pixels.sum(1), 1),
            max(map(len, names.values()), default=0),
        )
        for value, name in names.items():
            pairs = zip(
                self.images[:, value], 100 * self.pixels[:, value] / totals, strict=True
            )
            cells = (f"{images:9} {percent:8.3g} %" for images, percent in pairs)
            yield "          " + "  ".join([name.ljust(width), *cells])


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m ddpkit check", description=__doc__)
    add = parser.add_argument
    add("data", metavar="DIR", type=Path, help="as --data of main.py")
    add(
        "--workers",
        type=at_least(0),
        default=machine.cpus(),
        help="processes that read",
    )
    add(
        "--write",
        action="store_true",
        help="write what the report proposes for DIR/data.json",
    )
    given = parser.parse_args(argv)
    root, format, unmatched = given.data, read_format(given.data), list[str]()
    torch.set_num_threads(1)  # as in a loader worker
    distributed.setup(alone=True)
    kinds = [
        kind for kind in vars(process.own("dataset")).values() if isinstance(kind, type)
    ]
    has_masks = any(issubclass(kind, folders.MaskFiles) for kind in kinds)
    if has_masks:
        labels, pairs = read_classes(root / "classes.txt"), find_pairs(root, unmatched)
        masked = [folders.Part(each, format, labels) for each in pairs]
        survey = Survey(
            [folders.MaskFiles(part, tuple) for part in masked], given.workers
        )
        survey.errors += unmatched
        classes = survey.name_classes(labels, root)
    else:
        *samples, classes = folders.find_labelled(root)
        named = [folders.Part(each, format) for each in samples]
        survey = Survey(
            [folders.ImageFiles(part, tuple) for part in named], given.workers
        )
    wanted = survey.propose(format)
    names = {**dict(enumerate(classes)), **({VOID: "void"} if has_masks else {})}
    found = [f"error: {line}" for line in sorted(survey.errors)]
    found += [f"warning: {line}" for line in survey.warnings]
    for line in (*survey.describe(names, has_masks), *found):
        distributed.say(line)
    if wanted != format:
        how = "written" if given.write else "--write writes it"
        distributed.say(f"{NAME} {json.dumps(wanted.keys())} ({how})")
    if given.write:
        write_format(root, wanted)
    distributed.say(f"{len(survey.errors)} errors, {len(survey.warnings)} warnings")
    distributed.teardown()
    sys.exit(1 if survey.errors else 0)


def find_pairs(root: Path, errors: list[str]) -> Sequence[folders.Pairs]:
    """Return the pairs for training and for validation; images and masks without are errors."""

    def match(folder: Path) -> folders.Pairs:
        one, other = folders.find_names(folder)
        for path_of, others, kind in (one, other, "mask"), (other, one, "image"):
            for name in path_of.keys() - others.keys():
                form = folders.hint_at_forms(name, others)
                errors.append(f"{path_of[name]}: no {kind} of that name{form}")
        return [(one[name], other[name]) for name in sorted(one.keys() & other)]

    try:
        return folders.find_pairs(root, match)
    except UserError as error:
        if not errors:
            raise
        # Too few have a partner: what is wrong are the names.
        errors.append(error.line)
        return [], []
