"""Check a dataset before training: python -m ddpkit check DIR [main.py's flags]

arguments.py says what it does and takes.
"""

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddpkit import files
from ddpkit.data import loading
from ddpkit.data.format import NAME, Format, read_format, write_format
from ddpkit.data.samples import MapDataset
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed, process
from ddpkit.vision import folders, lists, places
from ddpkit.vision.bars import tqdm
from ddpkit.vision.masks import (
    VOID,
    Labels,
    Meant,
    add_meanings,
    explain_values,
    read_classes,
    unnamed,
)
from ddpkit.vision.tools import alike, arguments
from ddpkit.vision.tools.check_picture import draw_check

# what is wrong with a mask, without its path and numbers of its own
OF_MASK = re.compile(r".*?: (.*?)(, such as .*)? in \d+ pixels")
CHUNK = 8  # samples that a worker reads at once: what is passed on takes time, too


@dataclass
class Facts:
    """What reading a sample has shown, without its pixels."""

    part: str
    path: str  # of the image
    error: str = ""  # why training cannot use it; then the rest is empty
    size: tuple[int, int] = (0, 0)  # width and height, upright
    digest: str = ""  # of the image's shape and pixels
    # pixels of each mask value, or {class: 1}
    counts: dict[int, int] = field(default_factory=dict)
    meant: Meant = field(default_factory=dict)  # of the values in a mask
    is_turned: bool = False  # an image beside a mask
    # what `alike.thumbnail` makes of it
    small: Any = None
    # with "channels", (3, channels): pixels, sums of values 0 to 1, of squares
    moments: object = 0.0


def look_at_all(chunk: Sequence[tuple[str, MapDataset, int]]) -> list[Facts]:
    """Read samples; chunk: of each the part, its ImageFiles or MaskFiles, and its number there."""
    return [look(*key) for key in chunk]


def look(part: str, dataset: MapDataset, index: int) -> Facts:
    facts = Facts(part, dataset.samples[index][0])
    dataset.labels.meant = facts.meant  # of this mask alone; `Survey` compares them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about files that it can read
        try:
            image, *masks = dataset.open(index)
            pixels = image.decode(1)
            numbers = [mask.decode(1) for mask in masks]
        except Exception as error:  # Pillow raises many kinds for malformed files
            facts.error = getattr(error, "line", f"{facts.path}: {error!r}")
            return facts
    facts.size = image.size
    facts.small = alike.thumbnail(image)
    data = np.ascontiguousarray(pixels).data
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    facts.digest = f"{pixels.shape} {digest}"  # images in one colour differ by size
    if masks:
        facts.is_turned = image.is_turned
        values, counts = np.unique(numbers[0], return_counts=True)
        facts.counts = dict(zip(values.tolist(), counts.tolist(), strict=True))
    else:
        facts.counts = dataset.count_labels(index)
    channels = dataset.format.channels
    if channels:
        # in double precision, because all images are added up
        flat = pixels.reshape(-1, channels)
        count = np.full(channels, len(flat))
        sums = flat.sum(0, np.float64)
        squares = np.square(flat).sum(0, np.float64)
        facts.moments = np.stack([count, sums, squares])
    return facts


class Survey:
    """What is in a dataset, by part: train, val and, if there is one, test; what is wrong."""

    def __init__(self, root: Path, has_masks: bool) -> None:
        self.root = root
        self.has_masks = has_masks
        self.errors: list[str] = []
        self.warnings: list[str] = []
        # Why files are in no part: of folders, names and rows of lists.
        self.left_over: list[str] = []
        # By the image's path: why training cannot use it, or its mask.
        self.broken: dict[str, str] = {}
        self.classes: Sequence[str] = ()
        self.sizes: dict[str, list[tuple[int, int]]] = {}
        # of each part, by class number
        self.pixels: dict[str, Counter] = {}
        self.images: dict[str, Counter] = {}
        self.moments: Any = 0.0  # of training images
        self.meant: Meant = {}
        self.mixed: list[str] = []  # masks that mean something else
        self.turned: list[str] = []
        # of masks with values 1 to N their N; 0 of others
        self.largest: set[int] = set()
        # part, path and labels by digest
        self.first: dict[str, tuple[str, str, dict[int, int]]] = {}
        # paths and thumbnails of each part, but for images that are also in another
        self.small: dict[str, list[tuple[str, torch.Tensor]]] = {}

    def find_samples(self) -> dict[str, list]:
        """Return the samples of each part; note what is wrong with folders and lists."""
        find = folders.find_mask_pairs if self.has_masks else folders.find_labelled
        noted: list[UserError] = []
        train, val, *names = find(self.root, note=noted.append)
        samples = {"train": train, "val": val}
        if names:
            self.classes = names[0]
        try:
            # the lines about the others have been printed
            with contextlib.redirect_stdout(io.StringIO()):
                # training's samples come first, once more
                samples["test"] = find(self.root, "test", note=noted.append)[1]
        except UserError as error:  # training does without
            if error.code != "folders.find_parts":  # else there is none
                self.warnings.append(f"the test set is not read: {error.line}")
        others = [*val, *samples.get("test", ())]
        self.errors += folders.find_leaks(self.root, train, others)
        # of training twice
        self.left_over = list(dict.fromkeys(error.line for error in noted))
        return samples

    def note_classes(self) -> None:
        """Note which classes the split leaves without images for training, or for validation."""
        lacking = []
        for number, name in enumerate(self.classes):
            if not self.images["train"][number]:
                self.errors.append(
                    f"{self.root}: class {name} of val is not in the training set; add images of "
                    "it, or choose those of val"
                )
            elif not self.images["val"][number]:
                lacking.append(name)
        if lacking and self.images["val"]:
            self.warnings.append(
                f"no validation images of {shorten(lacking)}: their accuracy is not measured"
            )

    def read_all(self, format: Format, workers: int) -> None:
        """Read every sample, in so many processes."""
        labels = (
            read_classes(self.root / "classes.txt") if self.has_masks else unnamed()
        )
        kind = folders.MaskFiles if self.has_masks else folders.ImageFiles
        # as a dataset: DataLoader hands each chunk of keys to a worker
        keys: MapDataset = []
        for part, samples in self.find_samples().items():
            dataset = kind(folders.Part(samples, format, labels), tuple)
            self.sizes[part] = []
            self.small[part] = []
            self.pixels[part] = Counter()
            self.images[part] = Counter()
            keys += [(part, dataset, index) for index in range(len(dataset))]
        options = loading.workers(workers, torch.device("cpu"))
        loader: DataLoader = DataLoader(keys, CHUNK, collate_fn=look_at_all, **options)
        # the bar is on a terminal alone
        with tqdm(total=len(keys), unit="sample", disable=None) as bar:
            for chunk in loader:
                for facts in chunk:
                    self.add_facts(facts)
                bar.update(len(chunk))
        for part in self.small.keys() - {"train"}:
            self.warnings += alike.find_alike(
                self.small["train"], self.small[part], len(self.classes)
            )
        self.errors += self.mixed[:1]  # one for the whole set
        if self.turned:
            self.warnings.append(
                f"{self.turned[0]}: EXIF turns this image and {len(self.turned) - 1} others; "
                "their masks have to be upright"
            )
        if self.has_masks:
            self.name_classes(labels)
        else:
            self.note_classes()

    def add_facts(self, facts: Facts) -> None:
        part = facts.part
        path = facts.path
        if facts.error:
            self.broken[path] = facts.error
            return
        self.sizes[part].append(facts.size)
        self.pixels[part].update(facts.counts)
        self.images[part].update(facts.counts.keys())
        if part == "train":
            self.moments += facts.moments
        if facts.is_turned:
            self.turned.append(path)
        values = facts.counts.keys() - {0, VOID}
        if values:
            self.largest.add(max(values) if len(values) == max(values) else 0)
        try:
            add_meanings(self.meant, facts.meant)
        except UserError as error:
            self.mixed.append(error.line)
        own = (part, path, facts.counts)
        first = self.first.setdefault(facts.digest, own)
        other, copy, labels = first
        # in two parts it makes the metrics too good, in one only counts twice
        if other != part:
            self.errors.append(
                f"{path}: the same image is in {other}, {copy}; remove one, or, if the split is "
                "automatic, give both one group: docs/own-data.md"
            )
            return
        self.small[part].append((path, facts.small))
        if copy != path and labels != facts.counts and not self.has_masks:
            self.errors.append(f"{path}: the same image as {copy}, with another label")
        elif first is not own:  # also of a row that comes twice
            self.warnings.append(f"{path}: the same image as {copy}")

    def name_classes(self, labels: Labels) -> None:
        """Name the classes of masks; note too few, or values that only other parts have."""
        used = sorted(self.images["train"])
        self.classes = labels
        if not labels:
            largest = max((value for value in used if value != VOID), default=-1)
            self.classes = [str(number) for number in range(largest + 1)]
        # without values no mask could be read
        fault = explain_values(used, labels) if used else ""
        if fault:
            self.errors.append(f"{self.root}: {fault}")
            return
        if 0 not in self.largest and len(self.largest) > 2:
            self.warnings.append(
                f"{self.root}: each mask has all values from 1 to its largest, as if they numbered "
                "objects; segmentation needs numbers of classes"
            )
        known = {*range(len(self.classes)), VOID}
        for part, images in self.images.items():
            if images.keys() == {VOID}:
                # training does without a test set
                noted = self.warnings if part == "test" else self.errors
                noted.append(f"{self.root}: the masks of {part} are void everywhere")
            unknown = [str(value) for value in sorted(images.keys() - known)]
            if unknown:
                self.errors.append(
                    f"{self.root}: masks of {part} have {shorten(unknown)}, no training mask has"
                )

    def propose(self, format: Format) -> Format:
        """Return what data.json should say: with mean and deviation, if images have "channels"."""
        if not isinstance(self.moments, np.ndarray):  # RGB, or none could be read
            return format
        count, sums, squares = self.moments
        mean = sums / count
        std = np.sqrt(np.maximum(squares / count - mean**2, 0))
        std[std == 0] = 1  # of a channel that is the same everywhere
        # five digits are enough, and can be read
        return replace(
            format,
            mean=tuple(float(f"{value:.5g}") for value in mean),
            std=tuple(float(f"{value:.5g}") for value in std),
        )

    def lines(self) -> Iterator[str]:
        """Yield the lines about sizes, and one for each class."""
        for part, sizes in self.sizes.items():
            by_area = sorted(sizes, key=math.prod)
            # the least and the greatest, once if they are equal
            ends = dict.fromkeys(by_area[:1] + by_area[-1:])
            text = " to ".join(f"{width} x {height}" for width, height in ends)
            yield f"{part:10}{len(sizes)} images; width x height: {text or 'none'}"
        unit = "pixels" if self.has_masks else "images"
        yield f"classes   images, % of {unit}: {', '.join(self.images)}"
        names = dict(enumerate(self.classes))
        if self.has_masks:
            names[VOID] = "void"
        longest = max(map(len, names.values()), default=0)
        for value, name in names.items():
            line = f"          {name:{longest}}"
            for part, images in self.images.items():
                pixels = self.pixels[part]
                total = pixels.total() if self.has_masks else len(self.sizes[part])
                share = 100 * pixels[value] / max(total, 1)
                line += f"  {images[value]:9} {share:8.3g} %"
            yield line


def main(argv: Sequence[str] | None = None) -> None:
    given, args = arguments.parse_check(argv)
    root = given.data
    format = read_format(root)
    torch.set_num_threads(1)  # as in a loader worker
    # the project's code may ask its group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    survey = Survey(root, bool(process.own("model").STRIDE))  # none without masks
    survey.read_all(format, given.workers)
    for line in survey.lines():
        distributed.print0(line)
    sort_out_broken(survey, given.skip_broken)
    # of masks with the same wrong value the first alone
    lines_of: dict[str, list[str]] = {}
    for line in sorted(survey.errors):
        lines_of.setdefault(OF_MASK.sub(r"\1", line), []).append(line)
    for first, *others in lines_of.values():
        more = f" ({len(others)} more masks likewise)" if others else ""
        distributed.print0(f"error: {first}{more}")
    for line in survey.warnings:
        distributed.print0(f"warning: {line}")
    wanted = survey.propose(format)
    if wanted != format:
        how = "written" if given.write else "--write writes it"
        distributed.print0(f"{NAME} {json.dumps(wanted.keys())} ({how})")
    if given.write:
        write_format(root, wanted)
    refused = draw_check(given.picture, args)
    if refused and not survey.errors:
        survey.errors.append(refused)
    distributed.print0(f"{len(survey.errors)} errors, {len(survey.warnings)} warnings")
    if not survey.errors:
        distributed.print0(
            f"next: ./launch.sh --data {shlex.quote(str(root))} --output-dir runs/first"
        )
    distributed.teardown()
    sys.exit(1 if survey.errors else 0)


def sort_out_broken(survey: Survey, skip: bool) -> None:
    """Note what cannot be used as errors; or `skip` it, by lists without it, with warnings."""
    unused = [*survey.left_over, *survey.broken.values()]
    if not (skip and unused):
        survey.errors += unused
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # said already
            tables = make_lists(survey)
    except UserError as error:
        survey.errors += [f"{error.line}; --skip-broken needs that", *unused]
        return
    for path, rows in tables.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        files.save_text(path, text.getvalue())
        distributed.print0(f"{path}: {len(rows) - 1} images, which training reads")
    survey.warnings += [f"left out: {line}" for line in unused]


def make_lists(survey: Survey) -> dict[Path, list[list[str]]]:
    """Return the rows of each list without what cannot be used, by its path.

    Rows are those of the old one, or of what folders have. Raises a UserError if lists cannot be
    the same set without the rest.
    """
    root = survey.root
    has_masks = survey.has_masks
    for line in survey.left_over:
        named = line.partition(": ")[0]
        if not os.path.isfile(named) and ", line " not in named:
            raise UserError(f"{root}: fix the errors of folders and classes first")
    ignored: list[UserError] = []  # they are in `left_over`
    pairs = folders.read_parts(root, has_masks, [*survey.sizes], ignored.append)
    tables = {}
    for part in reversed(places.PARTS):  # with train.csv, the last one, lists are read
        path = folders.find_list(root, part)
        if path and not folders.has_lists(root):
            raise UserError(f"{path}: rename it: new lists would be read with it")
        if part not in pairs:
            continue
        kept = [pair for pair in pairs[part] if pair[0] not in survey.broken]
        if not kept:
            raise UserError(f"{root}: all images of {part} are broken: add others")
        if part == "train" and not has_masks:
            left = folders.names_in(kept, folders.has_several(root, kept))
            lost = sorted(set(survey.classes) - left)
            if lost:
                raise UserError(
                    f"{root}: all training images of class {shorten(lost)} are broken: add others"
                )
        columns = list(folders.COLUMNS[has_masks])
        if path:
            tables[path] = keep_rows(path, columns[0], {pair[0] for pair in kept})
        else:
            rows = [as_row(pair, root, has_masks) for pair in kept]
            tables[root / f"{part}.csv"] = [[*columns, "group"][: len(rows[0])], *rows]
    return tables


def keep_rows(path: Path, column: str, used: set[str]) -> list[list[str]]:
    """Return the first row of a list, and those of the images `used`, with all their columns."""
    rows = [row for _, row in lists.read_rows(path)]
    kept = [row for row in rows if os.path.join(path.parent, row[column]) in used]
    return [list(rows[0]), *(list(row.values()) for row in kept)]


def as_row(pair: Sequence[str], root: Path, has_masks: bool) -> list[str]:
    """Return paths below `root`, or a label; a UserError if a list would be read otherwise."""
    path, label, *group = pair
    several = folders.SEPARATOR in label and not has_masks
    row = [os.path.relpath(path, root), label, *group]
    if has_masks:
        row[1] = os.path.relpath(label, root)
    for value in row:
        if several or value.encode("utf-8", "ignore").decode().strip() != value:
            raise UserError(f"{path}: rename it: no list can have {row}")
    return row
