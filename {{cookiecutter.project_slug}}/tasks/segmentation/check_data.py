"""Check a data set before training: python check_data.py DIR

Reads every image and mask once and prints what is in them, what training would make of them, and
all that is wrong with them. Writes runs/check/check.png, images of every class with their masks,
and check.csv, all findings.

The exit status is 1 if there are errors: files that cannot be read, images without masks and masks
without images, sizes that differ, values that are no class, images that only EXIF turns, images
that are in train and in val or have two masks, and whatever else training refuses. Warnings alone
(an image twice in a part, classes that are rare or never come) leave it at 0.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.install_handlers()

import numpy as np
from matplotlib.axes import Axes
from torch.utils.data import Dataset

from dataset import SHORT_SIDE, build_datasets
from engine.check import command
from engine.check.plots import plain, show
from engine.check.reading import (
    PARTS,
    Facts,
    Finding,
    digest,
    look,
    orientation,
    reason,
)
from engine.check.report import Plan
from engine.check.survey import Survey, list_samples
from engine.data import folders, images, listing, loading
from engine.data.folders import Pairs, split_pairs
from engine.data.format import Format
from engine.data.images import LazyImage, open_image
from engine.data.masks import UNNAMED, VOID, Labels, explain_lack, read_classes, read_mask
from engine.data.samples import Packed
from engine.errors import UserError, shorten
from engine.ranks.failures import one_line_errors
from engine.run.flags import Help, Parser
from engine.run.palette import overlay
from flags import parse_args

ROOT = Path(__file__).resolve().parent
Sample = tuple[str, str, int]  # paths of image and mask, part: 0 for training, 1 for validation


class Files(Dataset):
    """The Facts of each of `samples`."""

    def __init__(self, samples: Packed, labels: Labels, format: Format) -> None:
        self.samples = samples
        self.labels = labels
        self.format = format

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Facts:
        path, mask_path, _ = self.samples[index]
        facts = look(path, self.format)
        try:
            mask = read_mask(mask_path, self.labels, self.format)
            turn = orientation(mask_path)
        except Exception as error:
            kind = "label" if can_be_read(mask_path, self.format) else "broken"
            facts.findings.append(Finding(kind, mask_path, reason(error, mask_path), path))
            return facts
        counts = np.bincount(mask.ravel(), minlength=VOID + 1)
        facts.void = int(counts[VOID])
        facts.counts = {int(value): int(counts[value]) for value in np.flatnonzero(counts[:VOID])}
        facts.target = digest(mask)
        if facts.size[0]:
            facts.findings += compare(path, mask_path, facts, mask.shape, turn)
        return facts


def can_be_read(path: str, format: Format) -> bool:
    try:
        images.read_image(path, None, format)
    except Exception:
        return False
    return True


def compare(
    path: str, mask_path: str, image: Facts, size: tuple[int, ...], turn: int
) -> list[Finding]:
    """Return what is wrong with an image and a mask that is, upright, of `size` (height, width).

    turn: the orientation in the mask's EXIF data.
    """
    stored = size[::-1] if turn in (5, 6, 7, 8) else size
    if size != image.size:
        text = f"{size[1]} x {size[0]} pixels, its image {image.size[1]} x {image.size[0]}"
        if stored == image.stored:
            text += "; equal without the rotation that EXIF asks for"
        return [Finding("size", mask_path, text, path)]
    if turn != image.turn and stored == image.stored:
        text = f"EXIF orientation {image.turn}, the mask has {turn}; turn the pixels instead"
        return [Finding("rotation", path, text, mask_path)]
    return []


def find_samples(root: Path) -> tuple[Pairs, Pairs, Labels]:
    """Return the pairs for training and for validation, and the classes of classes.txt."""
    return *folders.find_pairs(root), read_classes(root / "classes.txt")


def find_all(root: Path, findings: list[Finding]) -> tuple[Pairs, Pairs, Labels]:
    """Return what find_samples does, for folders that it refuses; what is wrong is added."""
    if (root / "train.csv").is_file():  # whose error names the line
        return [], [], UNNAMED
    has_train = (root / "train").is_dir() or not (root / "images").is_dir()
    train, val = find_pairs(root / "train" if has_train else root, findings), []
    if val_folder := listing.val_folder(root):
        val = find_pairs(val_folder, findings)
    elif len(train) > 1:
        train, val = split_pairs(train, root)
    try:
        return train, val, read_classes(root / "classes.txt")
    except UserError as error:
        file = str(root / "classes.txt")
        findings.append(Finding("layout", file, reason(error, file)))
        return train, val, UNNAMED


def find_pairs(folder: Path, findings: list[Finding]) -> Pairs:
    """Return the pairs of image and mask in `folder`; those without a partner are findings."""
    paths_of = []
    for kind in "images", "masks":
        found: dict[str, str] = {}
        try:
            listed = listing.collect([folder / kind])
        except UserError as error:
            file = str(folder / kind)
            findings.append(Finding("layout", file, reason(error, file)))
            return []
        for path, name in ((path, listing.composed(name)) for path, name in listed):
            if name in found:
                findings.append(Finding("layout", path, "two files of one name", found[name]))
            found.setdefault(name, path)
        paths_of.append(found)
    image_of, mask_of = paths_of
    findings += [Finding("no mask", path) for name, path in image_of.items() if name not in mask_of]
    findings += [
        Finding("no image", path) for name, path in mask_of.items() if name not in image_of
    ]
    return [(image_of[name], mask_of[name]) for name in sorted(image_of.keys() & mask_of)]


def number_classes(survey: Survey) -> list[str]:
    """Return the class numbers as names, up to the highest in the training masks."""
    return [str(number) for number in range(survey.highest[survey.parts == 0].max(initial=-1) + 1)]


def check_labels(survey: Survey, labels: Labels, classes: Sequence[str], root: Path) -> None:
    """Add findings of masks with numbers that no training mask has, and of too few classes."""
    for index in np.flatnonzero(survey.highest >= len(classes)):
        path, mask_path, _ = survey.samples[index]
        text = f"label {survey.highest[index]}, but no training mask has it; add classes.txt"
        survey.findings.append(Finding("label", mask_path, text, path))
        survey.sizes[index] = 0
    used = np.flatnonzero(survey.images[0]).tolist()
    void = [VOID] if survey.void[0] else []
    text = ""
    if len(used) < 2 and (used or survey.void[0]):  # else no mask could be read
        text = explain_lack(labels, used, int((survey.parts == 0).sum()), bool(survey.void[0]))
    elif not labels and len(used) < len(classes):
        values = list(map(str, [*used, *void]))
        lines = shorten([f"NAME = {value}" for value in values])
        text = (
            f"the values of the training masks ({shorten(values)}) are not class numbers from 0 "
            f"without a gap; write what they mean into classes.txt, one class per line: {lines}"
        )
    if text:
        survey.findings.append(Finding("layout", str(root), text))


def draw(
    axes: Axes, sample: Sample, format: Format, labels: Labels, classes: Sequence[str]
) -> None:
    """Draw an image with its mask in colour, and its file."""
    path, mask_path, part = sample
    mask = LazyImage.of(read_mask(mask_path, labels, format))
    show(axes, open_image(path, format), mask, functools.partial(overlay, classes=classes))
    axes.set_title(f"{PARTS[part]}: {plain(Path(path).name)}", fontsize=8, parse_math=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=Help)
    command.add_arguments(parser, ROOT / "runs/check")
    args = parser.parse_args(argv)
    command.prepare(args.data)
    samples, labels, findings = list_samples(args.data, find_samples, find_all)
    format = command.find_format(args.data, samples, args.channels)
    survey = Survey(samples, VOID, findings, has_masks=True)
    survey.read(Files(samples, labels, format), args.workers)
    classes = labels or number_classes(survey)
    check_labels(survey, labels, classes, args.data)
    survey.finish(classes, args.data)
    size = ["--image-size", str(args.image_size)] if args.image_size else []
    training = parse_args(["--data", str(args.data), *size])
    dataset = command.training_set(build_datasets, training)
    plan = Plan(dataset, args.batch_size, args.ranks, SHORT_SIDE, 4, format)
    drawing = functools.partial(draw, format=format, labels=labels, classes=classes)
    command.finish(args.data, survey, classes, plan, drawing, args.output, args.write)


if __name__ == "__main__":
    with one_line_errors(loading.explain):
        main()
