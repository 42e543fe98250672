"""Check a data set before training: python -m ddpkit check DIR [main.py's flags]

Reads every file once, and prints what is in them and all that is wrong with them. Draws check.png:
a dozen training images with their classes, or the outlines of their masks, and beside each what
dataset.py makes of it, with the flags of main.py that follow DIR, such as --augment rotation.

The exit status is 1 if there are errors: files that cannot be read, images without masks and masks
without images, sizes that differ, values that are no class, images that need another value_range in
data.json, or that are in two of train, val and test; not for warnings: images that come twice in a
part, or that EXIF turns beside their masks.
Whatever else training refuses is told in one line, with status 2.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from ddpkit import files
from ddpkit.data import folders, loading
from ddpkit.data.format import NAME, Format, read_format, write_format
from ddpkit.data.masks import (
    VOID,
    Labels,
    Meant,
    add_meanings,
    explain_values,
    read_classes,
    unnamed,
)
from ddpkit.data.samples import MapDataset
from ddpkit.errors import UserError, escape, shorten
from ddpkit.ranks import distributed, process
from ddpkit.ranks.cpus import cpus
from ddpkit.run.flags import Parser
from ddpkit.tools.check_picture import draw_check

PARTS = ("train", "val", "test")
# in a line of broken.txt, above what is written anew
WRITTEN = "written by python -m ddpkit check --skip-broken"
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
        self.paths = {sample[0] for part in parts for sample in part.samples}
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

    def separate_left_out(self, root: Path) -> None:
        """Make errors of what cannot be used, and warnings of what DIR/broken.txt leaves out."""
        listed = folders.read_broken(root)
        lines = list(self.broken.items())
        # of names without a partner
        lines += [(line.partition(": ")[0], line) for line in self.errors]
        self.errors = []
        for path, line in lines:
            named = line.partition(": ")[0]  # the mask may be
            if {os.path.abspath(path), os.path.abspath(named)} & listed.keys():
                self.warnings.append(f"left out by {folders.BROKEN}: {line}")
            else:
                self.errors.append(line)
        used = {os.path.abspath(path) for path in self.paths}
        used.update(os.path.abspath(line.partition(": ")[0]) for _, line in lines)
        unused = folders.explain_unused(root, listed, used)
        if unused:
            self.warnings.append(unused)

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
        help="write DIR/broken.txt: the images that training then leaves out",
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
    distributed.setup(alone=True)
    # the project's own data set says which kind of files it is made for
    has_masks = any(
        isinstance(kind, type) and issubclass(kind, folders.MaskFiles)
        for kind in vars(process.own("dataset")).values()
    )
    found: list[str] = []

    def note(error: UserError) -> None:
        found.append(error.line)

    labels = read_classes(root / "classes.txt") if has_masks else unnamed()
    classes: Sequence[str] = ()
    if has_masks:
        train, val = folders.find_mask_pairs(root, note=note)
    else:
        train, val, classes = folders.find_labelled(root, note=note)
    sets = [train, val]
    unread = ""
    try:
        # the lines about the others have been printed
        with contextlib.redirect_stdout(io.StringIO()):
            if folders.has_test(root, has_masks):
                find = folders.find_mask_pairs if has_masks else folders.find_labelled
                sets.append(find(root, "test", note=note)[1])
    except UserError as error:  # training does without
        unread = f"the test set is not read: {error.line}"
    found = list(dict.fromkeys(found))  # training's twice
    kind = folders.MaskFiles if has_masks else folders.ImageFiles
    parts = [kind(folders.Part(samples, format, labels), tuple) for samples in sets]
    survey = Survey(parts, given.workers)
    survey.errors += found
    if unread:
        survey.warnings.append(unread)
    if has_masks:
        classes = survey.name_classes(labels, root)
    names = dict(enumerate(classes))
    if has_masks:
        names[VOID] = "void"
    for line in survey.lines(names, has_masks):
        distributed.print0(line)
    if given.skip_broken:
        write_broken(root, survey.broken)
    survey.separate_left_out(root)
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


def write_broken(root: Path, broken: Mapping[str, str]) -> None:
    """Write DIR/broken.txt: each image that cannot be used, below a remark that says why.

    What others have written there stays, above a line that says what is written anew.
    """
    path = root / folders.BROKEN
    own = own_lines(folders.read_lines(path)) if path.is_file() else []
    listed = folders.parse_broken(root, own)
    lines = [*own, f"# {WRITTEN}; lines above this one stay"]
    for image, reason in sorted(broken.items()):
        name = os.path.relpath(image, root)
        if "\n" in name:
            continue  # it stays an error
        if os.path.abspath(image) in listed:
            continue
        lines.append(f"# {escape(reason)}")
        # a # or a space at its beginning would not be taken for the name's
        lines.append(os.path.join(".", name))
    with files.writing(path) as tmp_path:
        text = "\n".join(lines) + "\n"
        tmp_path.write_text(text, encoding="utf-8", errors="surrogateescape")
    count = len(folders.parse_broken(root, lines))
    distributed.print0(f"{path}: lists {count} images, which training leaves out")


def own_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines of DIR/broken.txt that a person has written, wherever they are."""
    marks = [number for number, line in enumerate(lines) if WRITTEN in line]
    first = marks[0] if marks else len(lines)
    # those that somebody has put at the end
    added = [line for line in lines[first:] if not line.startswith(("#", "./"))]
    return [line for line in [*lines[:first], *added] if line.strip()]
