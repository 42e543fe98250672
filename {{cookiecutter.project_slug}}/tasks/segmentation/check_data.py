"""Check a data set before training: python check_data.py DIR

Reads every image and mask once and prints what is in them, and all that is wrong with them. Writes
runs/check/check.png, images of every class with their masks, and check.csv, all findings.

The exit status is 1 if there are errors: files that cannot be read, images without masks and masks
without images, sizes that differ, values that are no class, images that only EXIF turns, images
that are in train and in val or have two masks. Warnings alone (an image twice in a part, classes
that are rare or never come) leave it at 0. Whatever else training refuses is told in one line, with
status 2.
"""

from collections.abc import Sequence
from pathlib import Path

import engine

if __name__ == "__main__":  # before torch, whose import takes seconds
    engine.prepare()

import numpy as np
from PIL import Image

from engine.check import report
from engine.check.survey import Facts, Finding, Survey, digest, look, reason
from engine.data import folders
from engine.data.folders import Pairs
from engine.data.images import ORIENTATION, LazyImage
from engine.data.masks import VOID, Labels, explain_lack, read_classes, read_mask
from engine.errors import UserError, shorten


class Masks(Survey):
    """A survey of images with masks, whose values `labels` names."""

    has_masks = True
    labels: Labels

    def __getitem__(self, index: int) -> Facts:
        path, mask_path, _ = self.samples[index]
        facts = look(path, self.format)
        try:
            mask = read_mask(mask_path, self.labels, self.format)
            with Image.open(mask_path) as file:
                turn = file.getexif().get(ORIENTATION, 1)
        except Exception as error:  # Pillow raises errors of many kinds for malformed files
            is_whole = isinstance(error, UserError) and "cannot be read" not in str(error)
            kind = "label" if is_whole else "broken"
            facts.findings.append(Finding(kind, mask_path, reason(error, mask_path), path))
            return facts
        counts = np.bincount(mask.ravel(), minlength=VOID + 1)
        facts.void = int(counts[VOID])
        facts.counts = {int(value): int(counts[value]) for value in np.flatnonzero(counts[:VOID])}
        facts.target = digest(mask)
        if facts.size[0]:
            facts.findings += compare(path, mask_path, facts, mask.shape, turn)
        return facts

    def open(self, sample: tuple) -> tuple[LazyImage, LazyImage]:
        mask = read_mask(sample[1], self.labels, self.format)
        return super().open(sample)[0], LazyImage.of(mask)


def compare(
    path: str, mask_path: str, image: Facts, size: tuple[int, ...], turn: int
) -> list[Finding]:
    """Return what is wrong with an image and a mask that is, upright, of `size` (height, width).

    turn: the orientation in the mask's EXIF data.
    """
    stored, own = (
        shape[::-1] if each > 4 else shape
        for shape, each in ((size, turn), (image.size, image.turn))
    )
    if size != image.size:
        text = f"{size[1]} x {size[0]} pixels, its image {image.size[1]} x {image.size[0]}"
        text += "; equal without the rotation that EXIF asks for" if stored == own else ""
        return [Finding("size", mask_path, text, path)]
    if turn != image.turn and stored == own:
        text = f"EXIF orientation {image.turn}, the mask has {turn}; turn the pixels instead"
        return [Finding("rotation", path, text, mask_path)]
    return []


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
        return pairs if val else folders.split_pairs(pairs[0], root)


def match(folder: Path, findings: list[Finding]) -> Pairs:
    image_of, mask_of = (
        {folders.composed(name): path for path, name in folders.collect([folder / kind])}
        for kind in ("images", "masks")
    )
    for kind, one, other in ("no mask", image_of, mask_of), ("no image", mask_of, image_of):
        findings += [Finding(kind, one[name]) for name in one if name not in other]
    return [(image_of[name], mask_of[name]) for name in sorted(image_of.keys() & mask_of)]


def check_labels(survey: Masks) -> None:
    """Add findings of masks with numbers that no training mask has, and of too few classes."""
    for index in np.flatnonzero(survey.highest >= len(survey.classes)):
        path, mask_path, _ = survey.samples[index]
        text = f"label {survey.highest[index]}, but no training mask has it; add classes.txt"
        survey.findings.append(Finding("label", mask_path, text, path))
        survey.sizes[index] = 0
    used, has_void = np.flatnonzero(survey.images[0]).tolist(), bool(survey.void[0])
    text, labels = "", survey.labels
    if len(used) < 2 and (used or has_void):  # else no mask could be read
        text = explain_lack(labels, used, int((survey.parts == 0).sum()), has_void)
    elif not labels and len(used) < len(survey.classes):
        values = list(map(str, [*used, *[VOID] * has_void]))
        lines = shorten([f"NAME = {value}" for value in values])
        text = (
            f"the values of the training masks ({shorten(values)}) are not class numbers from 0 "
            f"without a gap; write what they mean into classes.txt, one class per line: {lines}"
        )
    if text:
        survey.findings.append(Finding("layout", str(survey.root), text))


def main(argv: Sequence[str] | None = None) -> None:
    args, findings = report.start(argv, __doc__), list[Finding]()
    train, val = find_pairs(args.data, findings)
    labels = read_classes(args.data / "classes.txt")
    format = report.find_format(args.data, train[0][0])
    survey = Masks(args.data, (train, val), labels, format, VOID)
    survey.labels = labels
    survey.findings += findings
    survey.read(args.workers)
    if not labels:
        highest = survey.highest[survey.parts == 0].max(initial=-1)
        survey.classes = [str(number) for number in range(highest + 1)]
    check_labels(survey)
    report.finish(survey, args.output, args.write)


if __name__ == "__main__":
    engine.start(main)
