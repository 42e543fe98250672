"""Classify pictures: python predict.py FILES|FOLDER --checkpoint best.pt --output DIR

Writes DIR/predictions.csv: file, class, probability. The checkpoint alone says which network and
which classes; the pictures are prepared as for validation.
"""

import argparse
import csv
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

import model as task
from dataset import ImageDataset, eval_transform
from engine import checkpoint, distributed, files, loading, machine, pictures

ROOT = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="FILES|FOLDER")
    parser.add_argument("--checkpoint", metavar="FILE", default=ROOT / "runs/default/best.pt")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("predictions"))
    args = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, classes, flags = checkpoint.load_model(
        args.checkpoint, task.build_model, task.add_arguments, device
    )
    paths = [path for path, _ in pictures.collect(args.inputs)]
    transform = functools.partial(eval_transform, size=flags.image_size)
    dataset = ImageDataset([(path, -1) for path in paths], transform)
    loader = DataLoader(dataset, batch_size=32, num_workers=machine.workers())

    found: list[tuple[float, int]] = []  # probability and class number, in the order of paths
    for images, _ in loading.to_device(tqdm(loader, unit="batch", disable=None), device):
        with torch.inference_mode():
            best = torch.softmax(model(images), dim=1).max(dim=1)
        found += zip(best.values.tolist(), best.indices.tolist(), strict=True)
    path = args.output / "predictions.csv"
    with files.writing(path, parents=True) as beside, open(beside, "w") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("file", "class", "probability"))
        for picture, (probability, label) in zip(paths, found, strict=True):
            table.writerow((picture, classes[label], f"{probability:.4f}"))
    print(f"{len(paths)} pictures: {path}")


if __name__ == "__main__":
    with distributed.one_line_errors():
        main()
