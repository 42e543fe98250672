"""Classify images: python predict.py FILES|FOLDER --checkpoint best.pt --output DIR

Writes DIR/predictions.csv: file, class, its probability, and the probability of each class. The
checkpoint alone says which network and which classes; images are transformed as for validation.
Those that cannot be read are skipped and listed at the end, and the exit status is 1.
"""

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
from engine.data import images, listing, loading
from engine.ranks import devices
from engine.ranks.failures import one_line_errors
from engine.run import checkpoint
from engine.run.flags import Parser, add_image_arguments
from engine.run.predicting import Readable

ROOT = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="FILES|FOLDER")
    parser.add_argument("--checkpoint", metavar="FILE", default=ROOT / "runs/default/best.pt")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("predictions"))
    add_image_arguments(parser.add_argument_group("images", "default: as in training"), False)
    parser.set_defaults(max_megapixels=None)
    args = parser.parse_args(argv)

    device = devices.kind()
    model, classes, flags = checkpoint.open_model(
        args.checkpoint, task.build_model, task.add_arguments, device
    )
    paths = [path for path, _ in listing.collect(args.inputs)]
    transform = functools.partial(eval_transform, size=flags.image_size)
    values = args.value_range or flags.value_range
    most = args.max_megapixels or flags.max_megapixels
    format = images.Format(values, most, flags.channels, flags.mean, flags.std)
    dataset = ImageDataset([(path, -1) for path in paths], transform, format=format)
    batches = Readable(dataset, batch_size=32)
    table = args.output / "predictions.csv"
    columns = ["file", "class", "probability", *(f"probability_{name}" for name in classes)]
    with files.table(table, columns) as write:
        for indices, (batch, _) in batches:
            with torch.inference_mode():
                outputs = task.infer(model, loading.normalize(batch.to(device), format), flags)
            for index, scores in zip(indices, torch.softmax(outputs, 1).cpu(), strict=True):
                label = int(scores.argmax())
                probabilities = [f"{score:.4f}" for score in scores.tolist()]
                write((paths[index], classes[label], probabilities[label], *probabilities))
    batches.finish(table)


if __name__ == "__main__":
    with one_line_errors(loading.explain):
        main()
