"""What predict.py does in both tasks: opening a checkpoint, reading images, writing results."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

from engine import files
from engine.data import listing, loading, stacks
from engine.data.format import Format, read_format
from engine.data.images import LazyImage, open_image
from engine.errors import UserError, print_error
from engine.ranks import devices, distributed, failures, process
from engine.run import checkpoint, machine
from engine.run.palette import overlay, paint

Read = Callable[[LazyImage], Tensor]
BAND = 256  # rows that are tinted at once


class Predictor:
    """The network of a checkpoint, and images for it. Those that cannot be read are left out.

    inputs: files and folders. build_model, parse_args: of model.py and flags.py.

    model: in evaluation mode, on this machine's device. classes: their names. args: the flags with
    which it was trained.

        job = engine.Predictor("best.pt", ["images"], build_model, parse_args)
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
    ) -> None:
        self.device = devices.kind()
        opened = checkpoint.open_model(path, build_model, parse_args, self.device)
        self.model, self.classes, self.args, format = opened
        self.found = listing.collect(inputs)
        # Beside what training allowed, what data.json in a folder of images allows.
        folders = {path if path.is_dir() else path.parent for path in map(Path, inputs)}
        limits = [read_format(folder).max_megapixels for folder in folders]
        self.format = replace(format, max_megapixels=max(format.max_megapixels, *limits))
        self.broken: list[str] = []

    def batches(self, read: Read, batch_size: int) -> Iterator[tuple[list[str], Tensor]]:
        """Yield (paths, images (N, C, H, W), float32, normalised, on the device), in order.

        read: returns what an image becomes, a tensor (C, H, W) of the same size for all: uint8, or
            floats; it is called in other processes.
        """
        for paths, images in self._read(read, batch_size):
            yield paths, self.normalize(images)

    def images(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, image (C, H, W)) one by one, in order, each at its own size.

        An image is on the CPU, uint8, or float32, 0 to 1, with "channels" in data.json.
        """
        for (path,), (image,) in self._read(LazyImage.read, 1):
            yield path, image

    def normalize(self, images: Tensor) -> Tensor:
        """Return `images` (N, C, H, W) of `images()` as the network takes them, on the device."""
        images = images.to(self.device)
        if images.dtype == torch.uint8:
            return loading.normalize(images, self.format)
        return self.format.normalize(images)

    def _read(self, read: Read, batch_size: int) -> Iterator[tuple[list[str], Tensor]]:
        workers = machine.default_workers()
        loader = DataLoader(
            Tolerant([path for path, _ in self.found], read, self.format),
            batch_size,
            num_workers=workers,
            multiprocessing_context=process.worker_context(workers),
            worker_init_fn=process.start_worker,
            collate_fn=collate,
        )
        with tqdm(total=len(self.found), unit="img", disable=None) as bar:
            for paths, images, broken in loader:
                if paths:
                    yield paths, images
                self.broken += broken
                bar.update(len(paths) + len(broken))

    @contextlib.contextmanager
    def skipping(self, path: str, remedy: str) -> Iterator[None]:
        """Leave the block if it runs out of memory; the image then counts as one of the others.

        remedy: what to do about it.
        """
        try:
            with failures.naming(lambda _: path, [0], remedy):
                yield
        except failures.OutOfMemory as error:
            self.broken.append(str(error))

    @contextlib.contextmanager
    def table(
        self, path: Path, columns: Sequence[str]
    ) -> Iterator[Callable[[Sequence[object]], object]]:
        """Give the block a function that writes a row of the CSV file `path`; then `finish`."""
        with files.table(path, columns) as write:
            yield write
        self.finish(path)

    @contextlib.contextmanager
    def masks(self, output: Path) -> Iterator[Callable[[str, Tensor, Tensor], None]]:
        """Give the block a function that writes a mask and an overlay; then the legend; `finish`.

        It takes the path of an image, the image (C, H, W), and the mask, uint8 (H, W) or larger at
        the right and below, of class numbers.
        Raises a UserError if two images have the same name.
        """
        name_of = {path: name for name, path in listing.by_name(self.found).items()}

        def write(path: str, image: Tensor, mask: Tensor) -> None:
            pixels = stacks.visible(image).permute(1, 2, 0).numpy()
            numbers = mask[: len(pixels), : pixels.shape[1]].numpy()
            tinted = np.empty_like(pixels)
            for top in range(0, len(pixels), BAND):  # in less memory than all at once
                rows = slice(top, top + BAND)
                tinted[rows] = overlay(pixels[rows], numbers[rows], self.classes)
            drawn = {"masks": paint(numbers, self.classes), "overlays": Image.fromarray(tinted)}
            for kind, picture in drawn.items():
                file = output / kind / f"{name_of[path]}.png"
                with files.writing(file, parents=True) as tmp_path:
                    picture.save(tmp_path, format="png")

        yield write
        if len(self.broken) < len(self.found):
            from engine.run.gallery import draw_legend  # imports matplotlib, which takes a second

            draw_legend(output / "legend.png", self.classes)
        self.finish(f"{output / 'masks'}, {output / 'overlays'}")

    def finish(self, where: object) -> None:
        """Print the number of images; list the unreadable ones and exit with status 1 if any."""
        total = len(self.found)
        count = total - len(self.broken)
        distributed.say(
            f"{count} of {total} images predicted: {where if count else 'no file written'}"
        )
        for line in self.broken:
            print_error(line)
        if self.broken:
            sys.exit(1)


class Tolerant(Dataset):
    """(path, what `read` makes of the image), or a line for one that cannot be read."""

    def __init__(self, paths: Sequence[str], read: Read, format: Format) -> None:
        self.paths = paths
        self.read = read
        self.format = format

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, Tensor | str]:
        path = self.paths[index]
        try:
            image = self.read(open_image(path, self.format))
        except UserError as error:
            return path, str(error)
        if not isinstance(image, Tensor):
            raise UserError(
                f"{path}: predict.py makes a {type(image).__name__} of it; val_transform in "
                "dataset.py has to return a tensor (C, H, W)"
            )
        return path, image


def collate(
    samples: Sequence[tuple[str, Tensor | str]],
) -> tuple[list[str], Tensor | None, list[str]]:
    """Return the paths of the images that could be read, their batch, and the others' lines."""
    whole = [(path, image) for path, image in samples if isinstance(image, Tensor)]
    broken = [line for _, line in samples if isinstance(line, str)]
    batch = default_collate([image for _, image in whole]) if whole else None
    return [path for path, _ in whole], batch, broken
