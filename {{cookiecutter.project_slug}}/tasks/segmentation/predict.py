"""Segment images: python predict.py FILES|FOLDER --checkpoint best.pt --output DIR

Writes, at each image's own size, DIR/masks/<name>.png with the class numbers, which viewers show in
colours, and DIR/overlays/<name>.png with these colours over the image; DIR/legend.png names them.
The checkpoint alone says which network and which classes. Images that cannot be read are skipped
and listed at the end, and the exit status is 1.
"""

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
parser.add_argument("--tile", type=parser.at_least(0), help="default: as in training")
parser.add_argument(
    "--tta", action="store_true", help="also mirrored images, if trained with them"
)

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.before_imports(parser.parse_args)

import torch
from torch import Tensor

from dataset import STRIDE, pad
from model import build_model, infer


def main(argv: Sequence[str] | None = None) -> None:
    given = parser.parse_args(argv)
    job = ddpkit.Predictor(
        given.checkpoint, given.inputs, build_model, parse_args, given.output
    )
    args = job.args  # with which the network was trained
    if given.tile is not None:
        args.tile = given.tile
    args.tta |= given.tta

    @torch.inference_mode()
    def predict(part: Tensor) -> Tensor:
        logits = infer(job.model, job.normalize(part), args)
        # of each tile: logits of a whole image may need more memory than there is
        return logits.argmax(1, keepdim=True)

    with job.masks(given.output) as write:
        for path, image in job.images():
            masks = ddpkit.sliding_window(
                predict, pad(image, 0)[None], args.tile, STRIDE
            )
            write(path, image, masks[0, 0].byte().cpu())


if __name__ == "__main__":
    ddpkit.run_main(main)
