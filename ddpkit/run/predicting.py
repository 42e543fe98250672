"""Large images in tiles, and the images of predict.py."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

from ddpkit import files
from ddpkit.data import folders, loading
from ddpkit.data.format import Format, read_format
from ddpkit.data.images import LazyImage, open_image, visible
from ddpkit.errors import UserError, print_error
from ddpkit.ranks import devices, distributed, process
from ddpkit.run import checkpoint
from ddpkit.run.outputs import to_logits
from ddpkit.run.pictures import draw_legend, drawing, overlay, paint

Read = Callable[[LazyImage], Tensor]
Predict = Callable[[Tensor], Tensor]  # (1, 3, h, w) -> logits (1, classes, h, w)


class Predictor:
    """The network of a checkpoint, and images for it. Those that cannot be read are left out.

    inputs: files and folders. build_model, parse_args: of model.py and flags.py. output: the folder
    for what is written, which may lie below an input.

    model: in evaluation mode, on this machine's device. classes: their names. args: the flags with
    which it was trained.

        job = ddpkit.Predictor("best.pt", ["images"], build_model, parse_args, Path("out"))
        with job.table(Path("predictions.csv"), ["file", "class"]) as write:
            for paths, images in job.batches(val_transform, batch_size=32):
                numbers = job.model(images).argmax(1).tolist()
                ...
    """

    def __init__(
        self,
        path: Path | str,
        inputs: Sequence[str],
        build_model: Callable[..., nn.Module],
        parse_args: checkpoint.ParseArgs,
        output: Path | None = None,
    ) -> None:
        self.device = devices.kind()
        opened = checkpoint.open_model(path, build_model, parse_args, self.device)
        self.model, self.classes, self.args, format = opened
        self.found = folders.collect(inputs, output)
        # What training allowed, or what data.json in a folder of images allows.
        places = {path if path.is_dir() else path.parent for path in map(Path, inputs)}
        limits = [each.max_megapixels for each in (format, *map(read_format, places))]
        self.format = replace(format, max_megapixels=max(limits))
        self.broken: list[str] = []

    def batches(
        self, read: Read, batch_size: int
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Yield (paths, images (N, C, H, W), float32, normalised, on the device), in order.

        read: makes a tensor (C, H, W) of an image, of one size for all; in other processes.
        """
        for paths, images in self._read(read, batch_size):
            yield paths, self.normalize(default_collate(images))

    def images(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, image (C, H, W)), in order, each at its own size, on the CPU: uint8, or
        float32, 0 to 1, with "channels" in data.json.
        """
        for (path,), (image,) in self._read(LazyImage.read, 1):
            yield path, image

    def normalize(self, images: Tensor) -> Tensor:
        """Return `images` (N, C, H, W) of `images()` as the network takes them, on the device."""
        images = images.to(self.device)
        if images.dtype == torch.uint8:
            return loading.normalize(images, self.format)
        return self.format.normalize(images)

    def _read(
        self, read: Read, batch_size: int
    ) -> Iterator[tuple[list[str], list[Tensor]]]:
        paths, workers = [path for path, _ in self.found], loading.default_workers()
        loader: DataLoader = DataLoader(
            Tolerant(paths, read, self.format),
            batch_size,
            num_workers=workers,
            multiprocessing_context=process.worker_context(workers),
            worker_init_fn=process.start_worker,
            collate_fn=list,
        )
        with tqdm(total=len(paths), unit="img", disable=None) as bar:
            for samples in loader:
                whole = [(path, image) for path, image in samples if path]
                if whole:
                    yield [path for path, _ in whole], [image for _, image in whole]
                self.broken += [line for path, line in samples if not path]
                bar.update(len(samples))

    @contextlib.contextmanager
    def table(
        self, path: Path, columns: Sequence[str]
    ) -> Iterator[Callable[[Sequence[object]], object]]:
        """Give the block a function that writes a row of the CSV file `path`."""
        with files.table(path, columns) as write:
            yield write
        self.finish(path)

    @contextlib.contextmanager
    def masks(self, output: Path) -> Iterator[Callable[[str, Tensor, Tensor], None]]:
        """Give the block a function that writes a mask and an overlay, with a legend in the end.

        It takes the path of an image, the image (C, H, W), and class numbers, uint8 (H, W), or more
        at the right and below. Raises a UserError if two images have the same name.
        """
        name_of = {path: name for name, path in folders.by_name(self.found).items()}

        def write(path: str, image: Tensor, mask: Tensor) -> None:
            pixels = visible(image).permute(1, 2, 0).numpy()
            numbers = mask[: len(pixels), : pixels.shape[1]].numpy()
            tinted = Image.fromarray(overlay(pixels, numbers, self.classes))
            for kind, drawn in (
                ("masks", paint(numbers, self.classes)),
                ("overlays", tinted),
            ):
                file = output / kind / f"{name_of[path]}.png"
                with files.writing(file, parents=True) as tmp_path:
                    drawn.save(tmp_path, format="png")

        yield write
        if len(self.broken) < len(self.found):
            with drawing(output / "legend.png") as figure:
                draw_legend(figure, self.classes, {*range(256)})
        self.finish(f"{output / 'masks'}, {output / 'overlays'}")

    def finish(self, where: object) -> None:
        """Print the number of images; list the unreadable ones and exit with status 1 if any."""
        count = len(self.found) - len(self.broken)
        where = where if count else "no file written"
        distributed.say(f"{count} of {len(self.found)} images predicted: {where}")
        for line in self.broken:
            print_error(line)
        if self.broken:
            sys.exit(1)


@dataclass
class Tolerant(Dataset):
    """(path, what `read` makes of the image), or ("", a line) for one that cannot be read."""

    paths: Sequence[str]
    read: Read
    format: Format

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, Any]:
        path = self.paths[index]
        try:
            return path, self.read(open_image(path, self.format))
        except UserError as error:
            return "", str(error)
        except (AttributeError, KeyError, TypeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            line = (
                f"val_transform of dataset.py does not take an image alone ({reason})"
            )
            raise UserError(f"{line}: predict.py gives it that") from error


def in_tiles(predict: Predict, images: Tensor, tile: int, step: int) -> Tensor:
    """Return the logits of `images` (N, 3, H, W), float32 (N, classes, H, W).

    predict: takes images of any size, as a network's `forward` does.
    tile: side in pixels of the overlapping tiles in which larger images are predicted, one after
        another; smaller ones are predicted whole, all at once. 0: always whole.
    step: tiles begin at multiples of it, as the cells of a network of that stride do.

        logits = ddpkit.in_tiles(model.forward, images, args.tile, STRIDE)
    """
    if not is_tiled(images, tile, step):
        return to_logits(predict(images))
    found = (
        [logits for _, logits in bands(predict, image, tile, step)] for image in images
    )
    return torch.stack([torch.cat(each, 1) for each in found])


def bands(
    predict: Predict, image: Tensor, tile: int, step: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their logits) of `image` (3, H, W), from the top to the last row.

    tile, step: as of `in_tiles`. The logits are float32 (classes, rows, W); where tiles overlap,
    each pixel's are those of the tile in which it lies further from the edge.

        for rows, logits in ddpkit.bands(model.forward, image, 1024, STRIDE):
            mask[rows] = logits.argmax(0)
    """
    height, width = image.shape[1:]
    if not is_tiled(image, tile, step):
        yield slice(0, height), to_logits(predict(image[None]))[0]
        return
    for top, above, below in arrange(height, tile, step):
        band = torch.empty(0)
        for left, begin, end in arrange(width, tile, step):
            logits = to_logits(
                predict(image[None, :, top : top + tile, left : left + tile])
            )[0]
            if not len(band):
                band = logits.new_empty(len(logits), below - above, width)
            band[:, :, begin:end] = logits[
                :, above - top : below - top, begin - left : end - left
            ]
        yield slice(above, below), band


def is_tiled(images: Tensor, tile: int, step: int) -> bool:
    if tile and (tile % step or tile < 4 * step):
        raise UserError(
            f"--tile {tile} is not 0 or a multiple of {step} from {4 * step} up"
        )
    return 0 < tile < max(images.shape[-2:])


def arrange(side: int, tile: int, step: int) -> list[tuple[int, int, int]]:
    """Return of each tile along a `side` its start, and the pixels, from and to, that it is for."""
    last = max(side - tile, 0)
    # they overlap by 256 pixels, or by half
    gaps = -(-last // (tile - min(256, tile // 2)))
    starts = [last * i // gaps // step * step for i in range(gaps)] + [last]
    seams = [0, *((left + tile + right) // 2 for left, right in pairwise(starts)), side]
    return [(start, *part) for start, part in zip(starts, pairwise(seams), strict=True)]
