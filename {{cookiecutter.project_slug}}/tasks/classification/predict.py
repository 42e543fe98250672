"""Classify images: python predict.py FILES|FOLDER --checkpoint best.pt --output DIR

Writes DIR/predictions.csv: file, class, probability. The checkpoint alone says which network and
which classes; images are transformed as for validation. Those that cannot be read are skipped and
listed at the end, and the exit status is 1.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.install_handlers()

import torch

import model as task
from dataset import ImageDataset, eval_transform
from engine import files
from engine.data import images, loading
from engine.ranks.failures import one_line_errors
from engine.run import checkpoint
from engine.run.predicting import Readable

ROOT = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="FILES|FOLDER")
    parser.add_argument("--checkpoint", metavar="FILE", default=ROOT / "runs/default/best.pt")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("predictions"))
    args = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, classes, flags = checkpoint.open_model(
        args.checkpoint, task.build_model, task.add_arguments, device
    )
    paths = [path for path, _ in images.collect(args.inputs)]
    transform = functools.partial(eval_transform, size=flags.image_size)
    format = images.Format(flags.value_range, flags.max_megapixels)
    dataset = ImageDataset([(path, -1) for path in paths], transform, format=format)
    batches = Readable(dataset, batch_size=32)
    table = args.output / "predictions.csv"
    with files.table(table, ("file", "class", "probability")) as write:
        for indices, (batch, _) in batches:
            with torch.inference_mode():
                outputs = task.infer(model, loading.normalize(batch.to(device)), flags)
            best = torch.softmax(outputs, dim=1).max(dim=1)
            results = zip(indices, best.values.tolist(), best.indices.tolist(), strict=True)
            for index, probability, label in results:
                write((paths[index], classes[label], f"{probability:.4f}"))
    batches.finish(table)


if __name__ == "__main__":
    with one_line_errors(loading.explain):
        main()
