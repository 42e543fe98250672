"""Check a data set before training: python check_data.py DIR

Reads every image once and prints what is in it, what training would make of it, and all that is
wrong with it. Writes runs/check/check.png, images of every class, and check.csv, all findings.

The exit status is 1 if there are errors: images that cannot be read, that are in train and in val,
or in two classes, and whatever training refuses. Warnings alone (an image twice in a class, rare
classes) leave it at 0.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.install_handlers()

from matplotlib.axes import Axes
from torch.utils.data import Dataset

from dataset import SHORT_SIDE, build_datasets
from engine.check import command
from engine.check.plots import plain, show
from engine.check.reading import PARTS, Facts, Finding, look, reason
from engine.check.report import Plan
from engine.check.survey import Survey, list_samples
from engine.data import listing, loading
from engine.data.folders import Labelled, class_folders, find_classes, find_train, sort_names
from engine.data.format import Format
from engine.data.images import open_image
from engine.data.samples import Packed
from engine.errors import UserError
from engine.ranks.failures import one_line_errors
from engine.run.flags import Help, Parser
from flags import parse_args

ROOT = Path(__file__).resolve().parent
Sample = tuple[str, int, int]  # path, class number, part: 0 for training, 1 for validation


class Files(Dataset):
    """The Facts of each of `samples`."""

    def __init__(self, samples: Packed, format: Format) -> None:
        self.samples = samples
        self.format = format

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Facts:
        path, label, _ = self.samples[index]
        facts = look(path, self.format)
        facts.counts = {label: 1}
        facts.target = (label + 1).to_bytes(16, "little")
        return facts


def find_all(root: Path, findings: list[Finding]) -> tuple[Labelled, Labelled, list[str]]:
    """Return what find_classes does, for folders that it refuses; what is wrong is added."""
    if (root / "train.csv").is_file():  # whose error names the line
        return [], [], []
    train_folder, val_folder = find_train(root), listing.val_folder(root)
    parts = [folder for folder in (train_folder, val_folder) if folder]
    folders = [class_folders(part) if part.is_dir() else {} for part in parts]
    classes = sort_names({name for part in folders for name in part})
    found: tuple[list, list] = [], []
    for label, name in enumerate(classes):
        paths = [
            list_or_find(of.get(name, part / name), findings)
            for part, of in zip(parts, folders, strict=True)
        ]
        if not val_folder and len(paths[0]) > 1:
            paths = list(listing.split(paths[0], root))
        for samples, listed in zip(found, paths, strict=False):
            samples += [(path, label) for path in listed]
    return *found, classes


def list_or_find(folder: Path, findings: list[Finding]) -> list[str]:
    """Return the images of a class; what list_images refuses is added to `findings`."""
    try:
        return listing.list_images(folder)
    except UserError as error:
        findings.append(Finding("layout", str(folder), reason(error, str(folder))))
        return []


def draw(axes: Axes, sample: Sample, format: Format, classes: Sequence[str]) -> None:
    """Draw an image with its class and its file."""
    path, label, part = sample
    show(axes, open_image(path, format))
    title = f"{plain(classes[label])}\n{PARTS[part]}: {plain(Path(path).name)}"
    axes.set_title(title, fontsize=8, parse_math=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=Help)
    command.add_arguments(parser, ROOT / "runs/check")
    args = parser.parse_args(argv)
    command.prepare(args.data)
    samples, classes, findings = list_samples(args.data, find_classes, find_all)
    format = command.find_format(args.data, samples, args.channels)
    survey = Survey(samples, len(classes), findings)
    survey.read(Files(samples, format), args.workers)
    survey.finish(classes, args.data)
    size = ["--image-size", str(args.image_size)] if args.image_size else []
    training = parse_args(["--data", str(args.data), *size])
    dataset = command.training_set(build_datasets, training)
    plan = Plan(dataset, args.batch_size, args.ranks, SHORT_SIDE, 3, format)
    drawing = functools.partial(draw, format=format, classes=classes)
    command.finish(args.data, survey, classes, plan, drawing, args.output, args.write)


if __name__ == "__main__":
    with one_line_errors(loading.explain):
        main()
