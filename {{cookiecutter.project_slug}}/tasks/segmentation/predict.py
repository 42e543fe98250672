"""Segment images: python predict.py FILES|FOLDER --checkpoint best.pt --output DIR

Writes, at each image's own size, DIR/masks/<name>.png with the class numbers, which viewers show in
colours, and DIR/overlays/<name>.png with these colours over the image; DIR/legend.png names them.
The checkpoint alone says which network and which classes; images are transformed as for validation.
Those that cannot be read are skipped and listed at the end, and the exit status is 1.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.install_handlers()

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import model as task
from dataset import overlay, pad
from engine import files
from engine.data import images, listing, loading
from engine.ranks.failures import one_line_errors
from engine.run import checkpoint
from engine.run.flags import add_image_arguments
from engine.run.gallery import draw_legend
from engine.run.palette import paint
from engine.run.predicting import Readable


class Images(Dataset):
    """Images without masks. A sample is (uint8 (3, H, W) padded, its own H, its own W)."""

    def __init__(self, paths: Sequence[str], format: images.Format) -> None:
        self.paths = paths
        self.format = format

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        image = images.open_image(self.paths[index], self.format).read()
        return pad(image, 0), image.shape[1], image.shape[2]


ROOT = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="FILES|FOLDER")
    parser.add_argument("--checkpoint", metavar="FILE", default=ROOT / "runs/default/best.pt")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("predictions"))
    add_image_arguments(parser.add_argument_group("images", "default: as in training"))
    parser.set_defaults(max_megapixels=None)
    args = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, classes, flags = checkpoint.open_model(
        args.checkpoint, task.build_model, task.add_arguments, device
    )
    format = images.Format(
        args.value_range or flags.value_range, args.max_megapixels or flags.max_megapixels
    )
    paths = listing.by_name(listing.collect(args.inputs))
    names = list(paths)
    # Images differ in size, so they go through one at a time.
    batches = Readable(Images(list(paths.values()), format), batch_size=1)
    for (index,), (padded, height, width) in batches:
        with torch.inference_mode():
            output = model(loading.normalize(padded.to(device)))
        mask = output[0, :, :height, :width].argmax(0).cpu().numpy().astype(np.uint8)
        pixels = padded[0, :, :height, :width].permute(1, 2, 0).numpy()
        painted = Image.fromarray(overlay(pixels, mask, classes))
        for kind, drawn in ("masks", paint(mask, classes)), ("overlays", painted):
            path = args.output / kind / f"{names[index]}.png"
            with files.writing(path, parents=True) as tmp_path:
                drawn.save(tmp_path, format="png")
    draw_legend(args.output / "legend.png", classes)
    batches.finish(f"{args.output / 'masks'}, {args.output / 'overlays'}")


if __name__ == "__main__":
    with one_line_errors(loading.explain):
        main()
