"""Check a data set before training: python -m ddpkit check DIR [main.py's flags]

Reads every file once, and prints what is in them and all that is wrong with them. Draws check.png:
a dozen training images with their classes, or tinted by their masks, and beside each what
dataset.py makes of it, with the flags of main.py that follow DIR, such as --augment rotation.

The exit status is 1 if there are errors: files that cannot be read, images without masks and masks
without images, sizes that differ, values that are no class, images that need another value_range in
data.json, or that are in two of train, val and test; not for warnings: images that come twice in a
part, or that EXIF turns beside their masks.
Whatever else training refuses is told in one line, with status 2.
"""

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from tqdm import tqdm

from ddpkit import files
from ddpkit.data import loading
from ddpkit.data.format import NAME, Format, read_format, write_format
from ddpkit.data.samples import MapDataset
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed, process
from ddpkit.ranks.cpus import cpus
from ddpkit.run.flags import Parser
from ddpkit.vision import folders
from ddpkit.vision.masks import (
    VOID,
    Labels,
    Meant,
    add_meanings,
    explain_values,
    read_classes,
    unnamed,
)
from ddpkit.vision.tools.check_picture import draw_check

PARTS = ("train", "val", "test")
CHUNK = 8  # samples that a worker reads at once: what is passed on takes time, too


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


def look_at_all(chunk: Sequence[tuple[MapDataset, int]]) -> list[Facts]:
    """Read samples; chunk: of each the part, ImageFiles or MaskFiles, and its number there."""
    return [look(part, index) for part, index in chunk]


def look(part: MapDataset, index: int) -> Facts:
    part.labels.meant = {}  # of this mask alone; `Survey` compares them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about files that it can read
        try:
            image, *masks = part.open(index)
            seen = image.decode(1)
            numbers = [mask.decode(1) for mask in masks]
        except Exception as error:  # Pillow raises many kinds for malformed files
            path = part.samples[index][0]
            line = getattr(error, "line", f"{path}: {error!r}")
            return Facts(line)
    digest = hashlib.blake2b(np.ascontiguousarray(seen).data, digest_size=8).hexdigest()
    facts = Facts(size=(image.height, image.width), pixels=f"{seen.shape} {digest}")
    facts.meant = part.labels.meant
    if masks:
        facts.is_turned = image.is_turned
        values, counts = np.unique(numbers[0], return_counts=True)
        facts.counts = dict(zip(values.tolist(), counts.tolist(), strict=True))
    else:
        facts.counts = part.count_labels(index)
    channels = part.format.channels
    if channels:
        # in double precision, because all images are added up
        flat = seen.reshape(-1, channels)
        count = np.full(channels, len(flat))
        sums = flat.sum(0, np.float64)
        squares = np.square(flat).sum(0, np.float64)
        facts.moments = np.stack([count, sums, squares])
    return facts


def flatten(loader: DataLoader, bar: tqdm) -> Iterator[Facts]:
    with bar:
        for chunk in loader:
            yield from chunk
            bar.update(len(chunk))


class Survey:
    """What all samples of the parts have shown: train, val and, if there is one, test."""

    def __init__(self, parts: Sequence[MapDataset], workers: int) -> None:
        self.errors: list[str] = []
        # By the image's path: why training cannot use it, or its mask.
        self.broken: dict[str, str] = {}
        self.warnings: list[str] = []
        self.parts = PARTS[: len(parts)]
        self.sizes: list[list[tuple[int, int]]] = [[] for _ in parts]
        # by part and class number
        self.pixels = np.zeros((len(parts), 2**16), np.int64)
        self.images = np.zeros((len(parts), 2**16), np.int64)
        self.moments: Any = 0.0  # of training images
        meant: Meant = {}
        turned: list[str] = []
        mixed = ""
        first: dict[str, tuple[int, str]] = {}  # part and path, by the pixels' digest
        # as a data set: DataLoader hands each chunk of keys to a worker
        keys: MapDataset = [
            (part, index) for part in parts for index in range(len(part))
        ]
        options = loading.workers(workers, torch.device("cpu"))
        loader: DataLoader = DataLoader(keys, CHUNK, collate_fn=look_at_all, **options)
        # the bar is on a terminal alone
        bar = tqdm(total=len(keys), unit="sample", disable=None)
        for (part, index), facts in zip(keys, flatten(loader, bar), strict=True):
            number = parts.index(part)  # 0: training
            path = part.samples[index][0]
            if facts.error:
                self.broken[path] = facts.error
                continue
            self.sizes[number].append(facts.size)
            if facts.is_turned:
                turned.append(path)
            try:
                add_meanings(meant, facts.meant)
            except UserError as error:
                mixed = mixed or error.line  # one for the whole set
            if number == 0:
                self.moments += facts.moments
            for value, pixels in facts.counts.items():
                self.pixels[number, value] += pixels
                self.images[number, value] += 1
            other, copy = first.setdefault(facts.pixels, (number, path))
            # in two parts it makes the metrics too good, in one only counts twice
            if other != number:
                found = PARTS[other]
                self.errors.append(f"{path}: the same image is in {found}, {copy}")
            elif copy != path:
                self.warnings.append(f"{path}: the same image as {copy}")
        if mixed:
            self.errors.append(mixed)
        if turned:
            self.warnings.append(
                f"{turned[0]}: EXIF turns this image and {len(turned) - 1} others; their "
                "masks have to be upright"
            )

    def name_classes(self, labels: Labels, root: Path) -> list[str]:
        """Return the classes of masks; add an error of too few, or of numbers that train lacks."""
        used = np.flatnonzero(self.images[0]).tolist()
        classes: list[str] = labels
        if not labels:
            largest = max((value for value in used if value != VOID), default=-1)
            classes = [str(number) for number in range(largest + 1)]
        fault = ""
        if used:  # else no mask could be read
            fault = explain_values(used, labels)
        faults = [fault] if fault else []
        for number, part in enumerate(self.parts):
            others = np.flatnonzero(self.images[number]).tolist()
            unknown = [str(value) for value in others if len(classes) <= value < VOID]
            if unknown and not fault:
                of = "validation" if part == "val" else part
                faults.append(
                    f"{of} masks have {shorten(unknown)}, no training mask has"
                )
        self.errors += [f"{root}: {fault}" for fault in faults]
        return classes

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

    def lines(self, names: dict[int, str], has_masks: bool) -> Iterator[str]:
        """Yield the lines about sizes, and one for each class, by its number."""
        for part, sizes in zip(self.parts, self.sizes, strict=True):
            used = sorted(sizes, key=math.prod)  # by area
            # the least and the greatest, once if they are equal
            texts = [f"{width} x {height}" for height, width in used[:1] + used[-1:]]
            ends = " to ".join(dict.fromkeys(texts)) or "none"
            yield f"{part:10}{len(used)} images; width x height: {ends}"
        what = "pixels" if has_masks else "images"
        where = " and ".join(f"in {part}" for part in self.parts[-2:])
        if len(self.parts) > 2:
            where = f"in {self.parts[0]}, {where}"
        yield f"classes   images, and share of the {what}, {where}"
        totals = np.maximum(self.pixels.sum(1, keepdims=True), 1)
        shares = 100 * self.pixels / totals
        longest = max(map(len, names.values()), default=0)
        for value, name in names.items():
            line = f"          {name:{longest}}"
            for number in range(len(self.parts)):
                images = self.images[number, value]
                line += f"  {images:9} {shares[number, value]:8.3g} %"
            yield line


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m ddpkit check", description=__doc__)
    add = parser.add_argument
    add("data", metavar="DIR", type=Path, help="as --data of main.py")
    add(
        "--workers",
        type=parser.at_least(0),
        default=cpus(),
        help="processes that read",
    )
    add(
        "--write",
        action="store_true",
        help="write what the report proposes for DIR/data.json",
    )
    add(
        "--skip-broken",
        action="store_true",
        help="if images are broken, write lists without them: DIR/train.csv and others",
    )
    add(
        "--picture",
        type=Path,
        default=Path("check.png"),
        metavar="PATH",
        help="what to draw",
    )
    given, flags = parser.parse_known_args(argv)
    root = given.data
    # a mistake in them shows before all files are read
    args = process.own("flags").parse_args(["--data", str(root), *flags])
    format = read_format(root)
    torch.set_num_threads(1)  # as in a loader worker
    # the project's code may ask its group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # the project's own data set says which kind of files it is made for
    has_masks = any(
        isinstance(kind, type) and issubclass(kind, folders.MaskFiles)
        for kind in vars(process.own("dataset")).values()
    )
    noted: list[UserError] = []
    labels = read_classes(root / "classes.txt") if has_masks else unnamed()
    classes: Sequence[str] = ()
    if has_masks:
        train, val = folders.find_mask_pairs(root, note=noted.append)
    else:
        train, val, classes = folders.find_labelled(root, note=noted.append)
    sets = [train, val]
    unread = ""
    try:
        # the lines about the others have been printed
        with contextlib.redirect_stdout(io.StringIO()):
            if folders.has_test(root, has_masks):
                find = folders.find_mask_pairs if has_masks else folders.find_labelled
                sets.append(find(root, "test", note=noted.append)[1])
    except UserError as error:  # training does without
        unread = f"the test set is not read: {error.line}"
    # training's twice
    found = list(dict.fromkeys(error.line for error in noted))
    kind = folders.MaskFiles if has_masks else folders.ImageFiles
    parts = [kind(folders.Part(samples, format, labels), tuple) for samples in sets]
    survey = Survey(parts, given.workers)
    if unread:
        survey.warnings.append(unread)
    if has_masks:
        classes = survey.name_classes(labels, root)
    names = dict(enumerate(classes))
    if has_masks:
        names[VOID] = "void"
    for line in survey.lines(names, has_masks):
        distributed.print0(line)
    unused = [*found, *survey.broken.values()]
    is_asked = given.skip_broken and unused
    if is_asked and write_lists(root, has_masks, survey, found):
        survey.warnings += [f"left out: {line}" for line in unused]
    else:
        survey.errors += unused
    for line in sorted(survey.errors):
        distributed.print0(f"error: {line}")
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
    distributed.teardown()
    sys.exit(1 if survey.errors else 0)


def write_lists(
    root: Path, has_masks: bool, survey: Survey, found: Sequence[str]
) -> bool:
    """Write DIR/train.csv and the others, without images that cannot be used; or say why not."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # said already
            tables = make_lists(root, has_masks, survey, found)
        for path, rows in tables.items():
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows)
            files.save_text(path, text.getvalue())
            distributed.print0(f"{path}: {len(rows) - 1} images, which training reads")
    except UserError as error:
        survey.errors.append(f"{error.line}; --skip-broken needs that")
        return False
    return True


def make_lists(
    root: Path, has_masks: bool, survey: Survey, found: Sequence[str]
) -> dict[Path, list[list[str]]]:
    """Return the rows of each list, by its path: of the old one, or of what folders have.

    found: errors of lists and folders. Raises a UserError if lists cannot be the same set without
    the images.
    """
    for line in found:
        named = line.partition(": ")[0]
        if not os.path.isfile(named) and ", line " not in named:
            raise UserError(f"{root}: mend errors of folders and classes first")
    ignored: list[UserError] = []  # they are in `found`
    pairs = folders.read_parts(root, has_masks, survey.parts, ignored.append)
    tables = {}
    for part in reversed(PARTS):  # with train.csv, the last one, lists are read
        path = folders.find_list(root, part)
        if path and not folders.has_lists(root):
            raise UserError(f"{path}: rename it: new lists would be read with it")
        if part not in pairs:
            continue
        kept = [pair for pair in pairs[part] if pair[0] not in survey.broken]
        if not kept:
            raise UserError(f"{root}: all images of {part} are broken: add others")
        if part == "train" and not has_masks:
            several = folders.has_several(root, pairs[part])
            classes = folders.names_in(pairs[part], several)
            lost = sorted(classes - folders.names_in(kept, several))
            if lost:
                raise UserError(
                    f"{root}: all training images of class {shorten(lost)} are broken: add others"
                )
        columns = [*folders.COLUMNS[has_masks]]
        if path:
            tables[path] = keep_rows(path, columns[0], {pair[0] for pair in kept})
        else:
            rows = [as_row(pair, root, has_masks) for pair in kept]
            tables[root / f"{part}.csv"] = [columns, *rows]
    return tables


def keep_rows(path: Path, column: str, used: set[str]) -> list[list[str]]:
    """Return the first row of a list, and those of the images `used`, with all their columns."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        header, *rows = csv.reader(file)
    at = [name.strip() for name in header].index(column)
    kept = [header]
    for row in rows:
        name = "".join(row[at : at + 1]).strip()  # a row may be short
        if os.path.join(path.parent, name) in used:
            kept.append(row)
    return kept


def as_row(pair: tuple[str, str], root: Path, has_masks: bool) -> list[str]:
    """Return paths below `root`, or a label; a UserError if a list would be read otherwise."""
    path, label = pair
    several = folders.SEPARATOR in label and not has_masks
    row = [os.path.relpath(path, root), label]
    if has_masks:
        row[1] = os.path.relpath(label, root)
    for value in row:
        if several or value.encode("utf-8", "ignore").decode().strip() != value:
            raise UserError(f"{path}: rename it: no list can have {row}")
    return row
