"""Classify images: python predict.py FILES|FOLDER --checkpoint best.pt --output DIR

Writes DIR/predictions.csv: file, class, its probability, and the probability of each class. The
checkpoint alone says which network and which classes; images are transformed as for validation.
Those that cannot be read are skipped and listed at the end, and the exit status is 1.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import ddpkit
from flags import ROOT, parse_args

parser = ddpkit.Parser(description=__doc__)
parser.add_argument("inputs", nargs="+", metavar="FILES|FOLDER")
parser.add_argument(
    "--checkpoint", metavar="FILE", default=ROOT / "runs/default/best.pt"
)
parser.add_argument("--output", metavar="DIR", type=Path, default="predictions")
parser.add_argument(
    "--tta", action="store_true", help="also mirrored images, if trained with them"
)
parser.add_argument("--threshold", metavar="NUMBER|FILE", default="0.5",
    help="minimum probability if images have several labels; or thresholds.csv")  # fmt: skip

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.before_imports(parser.parse_args)

import torch

from dataset import val_transform
from model import build_model, infer


def main(argv: Sequence[str] | None = None) -> None:
    given = parser.parse_args(argv)
    job = ddpkit.Predictor(
        given.checkpoint, given.inputs, build_model, parse_args, given.output
    )
    args = job.args  # with which the network was trained
    args.tta |= given.tta
    columns = ["file", "class", "probability"]
    columns += [f"probability_{name}" for name in job.classes]
    read = val_transform(args.image_size, args.crop)
    limits = job.thresholds(given.threshold)
    with job.table(given.output / "predictions.csv", columns) as write:
        for paths, images in job.batches(read, batch_size=32):
            with torch.inference_mode():
                logits = infer(job.model, images, args).cpu()
            scores = logits.sigmoid() if args.several_labels else logits.softmax(1)
            for path, row in zip(paths, scores, strict=True):
                if args.several_labels:
                    is_there = row >= limits
                    found = ";".join(itertools.compress(job.classes, is_there))
                else:
                    found = job.classes[int(row.argmax())]
                numbers = [f"{score:g}" for score in (row.max(), *row)]
                write([path, found, *numbers])


if __name__ == "__main__":
    ddpkit.run_main(main)
