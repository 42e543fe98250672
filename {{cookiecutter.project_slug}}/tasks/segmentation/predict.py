"""Segment images: python predict.py FILES|FOLDER --checkpoint best.pt --output DIR

Writes, at each image's own size, DIR/masks/<name>.png with the class numbers, which viewers show in
colours, and DIR/overlays/<name>.png with these colours over the image; DIR/legend.png names them.
The checkpoint alone says which network and which classes; images are transformed as for validation.
Those that cannot be read, or that need too much memory, are skipped and listed at the end, and the
exit status is 1.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.install_handlers()

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import model as task
from dataset import STRIDE, overlay, pad
from engine import files
from engine.data import images, listing, loading, stacks
from engine.ranks import devices
from engine.ranks.failures import one_line_errors
from engine.run import checkpoint, tiles
from engine.run.flags import Parser, add_image_arguments
from engine.run.gallery import draw_legend
from engine.run.palette import paint
from engine.run.predicting import Readable


class Images(Dataset):
    """Images without masks. A sample is (pixels (3, H, W), padded; its own H, its own W)."""

    def __init__(self, paths: Sequence[str], format: images.Format) -> None:
        self.paths = paths
        self.format = format

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        image = images.open_image(self.paths[index], self.format).read()
        return pad(image, 0), image.shape[1], image.shape[2]


ROOT = Path(__file__).resolve().parent


@torch.inference_mode()
def segment(
    model: nn.Module,
    image: Tensor,
    classes: Sequence[str],
    flags: Namespace,
    format: images.Format,
) -> tuple[np.ndarray, np.ndarray]:
    """Return class numbers (H, W) and overlay (H, W, 3), uint8, of `image` (3, H, W).

    Band by band: logits of the whole image may need more memory than there is.
    """
    device = next(model.parameters()).device

    def predict(part: Tensor) -> Tensor:
        return task.infer(model, loading.normalize(part.to(device), format), flags)

    pixels = stacks.visible(image).permute(1, 2, 0).numpy()
    mask, tinted = np.empty(pixels.shape[:2], np.uint8), np.empty_like(pixels)
    for rows, logits in tiles.bands(predict, image, flags.tile, STRIDE):
        mask[rows] = logits.argmax(0).cpu().numpy()
        tinted[rows] = overlay(pixels[rows], mask[rows], classes)
    return mask, tinted


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="FILES|FOLDER")
    parser.add_argument("--checkpoint", metavar="FILE", default=ROOT / "runs/default/best.pt")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("predictions"))
    add_image_arguments(parser.add_argument_group("images", "default: as in training"), False)
    parser.set_defaults(max_megapixels=None)
    parser.add_argument(
        "--tile",
        metavar="PIXELS",
        type=task.tile_size,
        help="predict larger images in overlapping tiles of that side; 0: always whole "
        "(default: as in training)",
    )
    args = parser.parse_args(argv)

    device = devices.kind()
    model, classes, flags = checkpoint.open_model(
        args.checkpoint, task.build_model, task.add_arguments, device
    )
    values = args.value_range or flags.value_range
    most = args.max_megapixels or flags.max_megapixels
    format = images.Format(values, most, flags.channels, flags.mean, flags.std)
    paths = listing.by_name(listing.collect(args.inputs))
    names = list(paths)
    flags.tile = flags.tile if args.tile is None else args.tile
    remedy = f"lower --tile {flags.tile}" if flags.tile else "use --tile 1024"
    # Images differ in size, so they go through one at a time.
    batches = Readable(Images(list(paths.values()), format), batch_size=1)
    for (index,), (padded, height, width) in batches:
        with batches.skipping(paths[names[index]], remedy):
            whole = segment(model, padded[0], classes, flags, format)
            mask, tinted = (part[:height, :width] for part in whole)
            drawn = {"masks": paint(mask, classes), "overlays": Image.fromarray(tinted)}
            for kind, image in drawn.items():
                path = args.output / kind / f"{names[index]}.png"
                with files.writing(path, parents=True) as tmp_path:
                    image.save(tmp_path, format="png")
    if len(batches.broken) < batches.total:
        draw_legend(args.output / "legend.png", classes)
    batches.finish(f"{args.output / 'masks'}, {args.output / 'overlays'}")


if __name__ == "__main__":
    with one_line_errors(loading.explain):
        main()
