"""Check a data set before training: python -m ddpkit check DIR

Reads every file once, and prints what is in them and all that is wrong with them. Writes
runs/check/check.png, images of every class, with their masks, and check.csv, all findings if any.

The exit status is 1 if there are errors: files that cannot be read, images without masks and masks
without images, sizes that differ, values that are no class, images that need another value_range in
data.json, or that are in train and in val. Images that come twice in a part are warnings, which
leave it at 0. Whatever else training refuses is told in one line, with status 2.
"""

import hashlib
import itertools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ddpkit import files
from ddpkit.data import folders, loading
from ddpkit.data.folders import Pairs
from ddpkit.data.format import NAME, Format, read_format, write_format
from ddpkit.data.images import LazyImage, open_image, visible
from ddpkit.data.masks import UNNAMED, VOID, Labels, explain_values, read_classes, read_mask
from ddpkit.data.samples import Packed
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed, process
from ddpkit.run import machine, pictures
from ddpkit.run.flags import Parser, at_least

PARTS = ("train", "val")
KINDS = {  # of findings
    "layout": "folders that training refuses",
    "broken": "files that cannot be read",
    "no mask": "images without a mask",
    "no image": "masks without an image",
    "size": "masks of another size than their image",
    "label": "masks with values that are no class",
    "range": "images that need another value_range in data.json",
    "leak": "the same image in train and in val",
    "twice": "the same image more than once in a part",  # a warning; others are errors
}
NAMED = 10  # findings of a kind that are printed; check.csv has all
SAMPLES, PIXELS = 24, 330  # that are drawn, and their longer side


@dataclass(frozen=True)
class Finding:
    kind: str  # a key of KINDS
    file: str
    text: str = ""
    other: str = ""  # a second file


@dataclass
class Facts:
    """What reading a sample has shown, without its pixels."""

    size: tuple[int, ...] = (0, 0)  # height and width, upright; 0 if it cannot be read
    pixels: str = ""  # a digest of the image
    moments: np.ndarray | None = None  # (3, channels): pixels, sums of values 0 to 1, of squares
    counts: dict[int, int] = field(default_factory=dict)  # pixels of each mask value, or {class: 1}
    findings: list[Finding] = field(default_factory=list)


def look(path: str, format: Format) -> Facts:
    """Read the image at `path`. Whatever is wrong with it becomes a finding."""
    facts = Facts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about files that it can read
        try:
            image = open_image(path, format)
            seen = image.decode(1)
        except Exception as error:  # Pillow raises errors of many kinds for malformed files
            kind = "range" if "value_range" in str(error) else "broken"
            facts.findings.append(Finding(kind, path, reason(error, path)))
            return facts
    facts.size = image.height, image.width
    content = hashlib.blake2b(np.ascontiguousarray(seen).data, digest_size=8)
    facts.pixels = f"{seen.shape} {content.hexdigest()}"
    flat = seen.reshape(-1, seen.shape[2]) * np.float32(1 / 255 if seen.dtype == np.uint8 else 1)
    sums = flat.sum(0, np.float64), np.square(flat).sum(0, np.float64)
    facts.moments = np.stack([np.full(flat.shape[1], len(flat)), *sums])
    return facts


def reason(error: Exception, path: str) -> str:
    """Return what is wrong with the file at `path`, in one line."""
    text = " ".join((getattr(error, "line", "") or str(error) or type(error).__name__).split())
    return re.sub(rf"^{re.escape(path)}: |cannot be read \(|\); replace or remove it$", "", text)


class Survey(Dataset):
    """What reading has shown of all samples, (path, class or mask, part): some bytes for each.

    classes: their names, or what the masks mean.
    """

    def __init__(self, root: Path, parts: Sequence[Sequence], classes: Sequence[str]) -> None:
        samples = [(*sample, n) for n, part in enumerate(parts) for sample in part]
        self.root, self.classes, self.format = root, classes, read_format(root)
        self.labels = classes if isinstance(classes, Labels) else None
        values = VOID + 1 if self.has_masks else len(classes)
        self.samples, self.findings = Packed(samples), list[Finding]()
        self.totals = [*map(len, parts)]
        self.sizes = np.zeros((len(samples), 2), np.int32)  # 0 if training cannot use it
        self.pixels, self.images = (np.zeros((2, values), np.int64) for _ in range(2))  # by part
        self.moments: np.ndarray | None = None  # of training images
        self.first: dict[str, int] = {}  # sample, by its pixels' digest
        self.shown: dict[int, list[int]] = {}  # some samples of each class

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Facts:
        path, label, _ = self.samples[index]
        facts = look(path, self.format)
        if not self.has_masks:
            facts.counts = {label: 1}
            return facts
        try:
            mask = self.mask(label)
        except Exception as error:  # Pillow raises errors of many kinds for malformed files
            is_whole = isinstance(error, UserError) and "cannot be read" not in str(error)
            kind = "label" if is_whole else "broken"
            facts.findings.append(Finding(kind, label, reason(error, label), path))
            return facts
        values, counts = np.unique(mask, return_counts=True)
        facts.counts = dict(zip(values.tolist(), counts.tolist(), strict=True))
        if facts.size[0] and mask.shape != facts.size:
            text = "{1} x {0} pixels, its image {3} x {2}".format(*mask.shape, *facts.size)
            facts.findings.append(Finding("size", label, text, path))
        return facts

    @property
    def has_masks(self) -> bool:
        return self.labels is not None

    def mask(self, path: str) -> np.ndarray:
        assert self.labels is not None
        return read_mask(path, self.labels, self.format)

    def read(self, workers: int) -> None:
        options = loading.workers(workers, torch.device("cpu"))
        loader: DataLoader = DataLoader(self, batch_size=None, **options)
        for index, facts in enumerate(tqdm(loader, unit="sample", disable=None)):
            self.add(index, facts)

    def add(self, index: int, facts: Facts) -> None:
        path, _, part = self.samples[index]
        self.findings += facts.findings
        if part == 0 and facts.moments is not None:
            self.moments = facts.moments + (0 if self.moments is None else self.moments)
        self.sizes[index] = 0 if facts.findings else facts.size
        for value, pixels in facts.counts.items():
            self.pixels[part, value] += pixels
            self.images[part, value] += 1
            if not facts.findings and len(shown := self.shown.setdefault(value, [])) < SAMPLES:
                shown.append(index)
        first = self.first.setdefault(facts.pixels, index)
        if facts.pixels and first != index:
            other = self.samples[first]
            kind = "leak" if other[-1] != part else "twice"
            self.findings.append(Finding(kind, path, "", other[0]))

    def channels(self) -> tuple[list[float], list[float]]:
        """Return mean and deviation per channel over all pixels of the training images, in 0..1."""
        assert self.moments is not None
        mean, square = self.moments[1:] / self.moments[0]
        return mean.tolist(), np.sqrt(np.maximum(square - mean**2, 0)).tolist()


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m ddpkit check", description=__doc__)
    add = parser.add_argument
    add("data", metavar="DIR", type=Path, help="as --data of main.py")
    add("--output", metavar="FOLDER", type=Path, default="runs/check", help="for the two files")
    add("--workers", type=at_least(0), default=machine.cpus(), help="processes that read")
    add("--write", action="store_true", help="write what the report proposes for DIR/data.json")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)  # as in a loader worker
    kinds = [kind for kind in vars(process.own("dataset")).values() if isinstance(kind, type)]
    distributed.setup(alone=True)
    if any(issubclass(kind, folders.MaskFiles) for kind in kinds):
        findings: list[Finding] = []
        parts = find_pairs(given.data, findings)
        survey = Survey(given.data, parts, read_classes(given.data / "classes.txt"))
        survey.findings += findings
    else:
        *parts, classes = folders.find_labelled(given.data)
        survey = Survey(given.data, parts, classes)
    survey.read(given.workers)
    if survey.has_masks:
        check_values(survey)
    errors = report(survey, given.output, given.write)
    distributed.teardown()
    sys.exit(1 if errors else 0)


def find_pairs(root: Path, findings: list[Finding]) -> Sequence[Pairs]:
    """Return the pairs for training and for validation; images and masks without are added."""
    try:
        return folders.find_pairs(root)
    except UserError:
        if (root / "train.csv").is_file():
            raise
        train = root / "train" if (root / "train").is_dir() else root
        val = folders.find_val(root)
        pairs = [match(folder, findings) for folder in (train, val) if folder]
        if not findings or not pairs[0]:
            raise
        return pairs if val else folders.split(pairs[0], root)


def match(folder: Path, findings: list[Finding]) -> Pairs:
    image_of, mask_of = (
        {name: path for path, name in folders.collect([folder / kind])}
        for kind in ("images", "masks")
    )
    for kind, one, other in ("no mask", image_of, mask_of), ("no image", mask_of, image_of):
        findings += [Finding(kind, one[name]) for name in one if name not in other]
    return [(image_of[name], mask_of[name]) for name in sorted(image_of.keys() & mask_of)]


def check_values(survey: Survey) -> None:
    """Name the classes; add a finding of too few, or of numbers that no training mask has."""
    used, others = (np.flatnonzero(counts).tolist() for counts in survey.images)
    has_names = survey.classes is not UNNAMED
    if not has_names:
        highest = max((number for number in used if number != VOID), default=-1)
        survey.classes = [str(number) for number in range(highest + 1)]
    text = explain_values(used, has_names) if used else ""  # no mask could be read
    unknown = [str(value) for value in others if len(survey.classes) <= value < VOID]
    if unknown and not text:
        text = f"validation masks have {shorten(unknown)}, no training mask has; add classes.txt"
    if text:
        survey.findings.append(Finding("layout", str(survey.root), text))


def propose(survey: Survey) -> Format:
    """Return what data.json should say: with mean and deviation, if images have "channels"."""
    if survey.moments is None or not survey.format.channels:
        return survey.format
    means, deviations = ([float(f"{x:.5g}") for x in each] for each in survey.channels())
    return replace(survey.format, mean=tuple(means), std=tuple(x or 1.0 for x in deviations))


def report(survey: Survey, output: Path, has_to_write: bool) -> int:
    """Print the report and write the files; return the number of errors."""
    wanted, findings = propose(survey), survey.findings
    for line in (*describe(survey, wanted), *list_findings(survey)):
        distributed.say(line)
    errors = sum(finding.kind != "twice" for finding in findings)
    distributed.say(f"{errors} errors, {len(findings) - errors} warnings")
    with files.table(output / "check.csv", ("what", "file", "other file", "text")) as write:
        for name in "check.png", "check.csv":
            (output / name).unlink(missing_ok=True)
        for each in findings:
            write((each.kind, each.file, each.other, each.text))
    draw(survey, output / "check.png")
    distributed.say(f"written to {os.path.relpath(output)}")
    if has_to_write and wanted != read_format(survey.root):
        write_format(survey.root, wanted)
        distributed.say(f"written: {survey.root / NAME}")
    return errors


def describe(survey: Survey, wanted: Format) -> Iterator[str]:
    """Yield the lines about images and their values, and one for each class."""
    for name, sizes in zip(PARTS, np.split(survey.sizes, survey.totals[:1]), strict=True):
        used = sorted(sizes[sizes[:, 0] > 0].tolist(), key=math.prod)
        ends = dict.fromkeys(f"{width} x {height}" for height, width in (*used[:1], *used[-1:]))
        unused = f", {len(sizes) - len(used)} of them with errors" * (len(used) < len(sizes))
        yield f"{name:10}{len(sizes)} images{unused}; width x height: {' to '.join(ends) or 'none'}"
    if survey.moments is not None:
        for name, values in zip(("mean", "deviation"), survey.channels(), strict=True):
            numbers = " ".join(f"{value:.4f}" for value in values)
            yield f"{name:10} {numbers} (of the training images' channels, 0..1)"
    keys = f"{json.dumps(wanted.keys())} (--write writes it)"
    yield f"{NAME} {'as it should be' if wanted == read_format(survey.root) else keys}"
    what = "pixels" if survey.has_masks else "images"
    yield f"classes   {len(survey.classes)}; images, and share of the {what}, in train and in val"
    names = dict(enumerate(survey.classes))
    names |= {VOID: "void"} if survey.has_masks else {}
    totals, width = np.maximum(survey.pixels.sum(1), 1), max(map(len, names.values()))
    for value, name in names.items():
        found = zip(survey.images[:, value], 100 * survey.pixels[:, value] / totals, strict=True)
        cells = (f"{images:9} {percent:8.3g} %" for images, percent in found)
        yield "          " + "  ".join([name.ljust(width), *cells])


def list_findings(survey: Survey) -> Iterator[str]:
    """Yield the first findings of each kind, and all broken files, below the data set's folder."""
    for kind, title in KINDS.items():
        some = sorted((f for f in survey.findings if f.kind == kind), key=lambda f: f.file)
        if some:
            yield f"{'warning' if kind == 'twice' else 'error'}: {title}: {len(some)}"
        most = len(some) if kind == "broken" else NAMED
        for finding in some[:most]:
            paths = filter(None, (finding.file, finding.other))
            names = ", ".join(os.path.relpath(path, survey.root) for path in paths)
            yield f"  {names}{': ' if finding.text else ''}{finding.text}"
        if len(some) > most:
            yield f"  and {len(some) - most} more in check.csv"


def draw(survey: Survey, path: Path) -> None:
    """Draw samples of all classes in turn, tinted by their masks, with their files."""
    turns = itertools.zip_longest(*(survey.shown[value] for value in sorted(survey.shown)))
    indices = dict.fromkeys(index for turn in turns for index in turn if index is not None)
    examples = []
    for sample in (survey.samples[index] for index in [*indices][:SAMPLES]):
        image = open_image(sample[0], survey.format)
        scale = PIXELS / max(image.height, image.width)
        size = max(1, round(image.height * scale)), max(1, round(image.width * scale))
        pixels = visible(image.read(size=size))
        if survey.has_masks:
            target = LazyImage.of(survey.mask(sample[1])).read(size=size)
        else:
            target = torch.tensor(sample[1])
        name = f"{PARTS[sample[-1]]}: {Path(sample[0]).name}"
        examples.append((pixels, target, target[None], [name]))

    def show(axes: Any, image: Tensor, target: Tensor, _: Tensor, classes: Sequence[str]) -> None:
        pixels = image.permute(1, 2, 0).numpy()
        axes.imshow(pictures.overlay(pixels, target.numpy(), classes) if target.ndim else pixels)
        axes.set_title("" if target.ndim else classes[int(target)])

    if examples:
        pictures.draw_images(path, examples, show, survey.classes)
