"""Check a data set before training: python check_data.py DIR

Reads every image and mask once and prints what is in them, and all that is wrong with them. Writes
runs/check/check.png, images of every class with their masks, and check.csv, all findings if any.

The exit status is 1 if there are errors: files that cannot be read, images without masks and masks
without images, sizes that differ, values that are no class, images that need another value_range in
data.json, or that are in train and in val.
Images that come twice in a part are warnings, which leave it at 0. Whatever else training refuses
is told in one line, with status 2.
"""

from collections.abc import Sequence
from pathlib import Path

import ddpkit

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.prepare()

import numpy as np

from ddpkit.check.survey import Facts, Finding, Survey, finish, look, reason, start
from ddpkit.data import folders
from ddpkit.data.folders import Pairs
from ddpkit.data.format import read_format
from ddpkit.data.masks import VOID, Labels, explain_values, read_classes, read_mask
from ddpkit.errors import UserError, shorten


class Masks(Survey):
    """A survey of images with masks, whose values `labels` names."""

    has_masks = True
    labels: Labels

    def __getitem__(self, index: int) -> Facts:
        path, mask_path, _ = self.samples[index]
        facts = look(path, self.format)
        try:
            mask = self.mask(self.samples[index])
        except Exception as error:  # Pillow raises errors of many kinds for malformed files
            is_whole = isinstance(error, UserError) and "cannot be read" not in str(error)
            kind = "label" if is_whole else "broken"
            facts.findings.append(Finding(kind, mask_path, reason(error, mask_path), path))
            return facts
        values, counts = np.unique(mask, return_counts=True)
        facts.counts = dict(zip(values.tolist(), counts.tolist(), strict=True))
        if facts.size[0] and mask.shape != facts.size:
            text = "{1} x {0} pixels, its image {3} x {2}".format(*mask.shape, *facts.size)
            facts.findings.append(Finding("size", mask_path, text, path))
        return facts

    def mask(self, sample: tuple) -> np.ndarray:
        return read_mask(sample[1], self.labels, self.format)


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


def check_labels(survey: Masks) -> None:
    """Add a finding of too few classes, or of numbers that no training mask has."""
    used, others = (np.flatnonzero(counts).tolist() for counts in survey.images)
    text = explain_values(used, bool(survey.labels)) if used else ""  # no mask could be read
    unknown = [str(value) for value in others if len(survey.classes) <= value < VOID]
    if unknown and not text:
        text = f"validation masks have {shorten(unknown)}, no training mask has; add classes.txt"
    if text:
        survey.findings.append(Finding("layout", str(survey.root), text))


def main(argv: Sequence[str] | None = None) -> None:
    args, findings = start(argv, __doc__), list[Finding]()
    train, val = find_pairs(args.data, findings)
    labels = read_classes(args.data / "classes.txt")
    survey = Masks(args.data, (train, val), labels, read_format(args.data), values=VOID + 1)
    survey.labels = labels
    survey.findings += findings
    survey.read(args.workers)
    if not labels:
        highest = np.flatnonzero(survey.images[0, :VOID]).max(initial=-1)
        survey.classes = [str(number) for number in range(highest + 1)]
    check_labels(survey)
    finish(survey, args.output, args.write)


if __name__ == "__main__":
    ddpkit.start(main)
