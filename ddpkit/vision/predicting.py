"""The images of predict.py, and what it writes of them."""

import contextlib
import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from ddpkit import files
from ddpkit.data import loading, normalizing
from ddpkit.data.format import Format, read_format
from ddpkit.errors import UserError, print_error, shorten
from ddpkit.ranks import devices, distributed
from ddpkit.ranks.replicas import uncompiled
from ddpkit.run import checkpoint, states
from ddpkit.vision import folders, lists, networks
from ddpkit.vision.bars import tqdm
from ddpkit.vision.images import LazyImage, open_image, visible
from ddpkit.vision.masks import Classes
from ddpkit.vision.pictures import draw_legend, drawing, overlay, paint

ParseArgs = Callable[[Sequence[str], dict[str, Any]], Namespace]
Read = Callable[[LazyImage], Tensor]
# Flags that one kind of project has
OF_TASKS = {
    "classification": "crop_pct crop_scale drop_path grad_checkpointing",
    "segmentation": "cutmix encoder loss tile",
}


def open_model(
    path: Path | str,
    build_model: Callable[[Namespace, Sequence[str], int], nn.Module],
    parse_args: ParseArgs,
    device: torch.device,
) -> tuple[nn.Module, Classes, Namespace, Format]:
    """Return the network of a checkpoint, ready to predict, its classes, flags and image format.

    build_model, parse_args: of model.py and flags.py; flags that are newer than the checkpoint have
        their defaults.

    Raises a UserError if the file cannot be read, or holds other weights than `build_model` makes.

        model, classes, args, format = ddpkit.open_model("best.pt", build_model, parse_args, device)
    """
    state = checkpoint.read(path)
    saved = state["args"]
    try:
        args = parse_args([], saved)
        tasks = task_of(saved), task_of(vars(args).keys() - saved.keys())
        if all(tasks):
            raise UserError(
                f"is from a {tasks[0]} project, but this is a {tasks[1]} project"
            )
        format = Format(**state["format"])
        with networks.offline():  # a stranger's checkpoint may name any network
            model = build_model(args, state["classes"], state["channels"])
    except Exception as error:
        # or of a library that takes the name
        fault = networks.explain_network(error) or error
        if not isinstance(fault, UserError):
            raise
        raise UserError(f"{path}: {fault.line}", fault.code) from None
    checkpoint.load_weights(model, state)
    model = uncompiled(model)  # a compiled one would compile for each size
    model = model.eval().to(device)
    model.to(memory_format=devices.memory_layout(device))
    with states.fitting(str(path), "the colors of its classes", checkpoint.ANOTHER):
        classes = Classes(state["classes"], state.get("colors"))
    return model, classes, args, format


def task_of(flags: Collection[str]) -> str:
    """Return the task all of whose own flags are among `flags`, by their names, or nothing."""
    for task, names in OF_TASKS.items():
        if {*names.split()} <= {*flags}:
            return task
    return ""


class Predictor:
    """The network of a checkpoint, and images for it. Those that cannot be read are left out.

    inputs: files and folders. build_model, parse_args: of model.py and flags.py. output: the folder
    for what is written, which may lie below an input.

    model: in evaluation mode, on this machine's device. classes: their names. args: the flags with
    which it was trained. `thresholds` raises a UserError for a file that has none.

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
        parse_args: ParseArgs,
        output: Path | None = None,
    ) -> None:
        self.device = devices.kind()
        # of which the script may refuse one that whoever types the command has not given
        distributed.print0(f"model and flags are those of {path}")
        self.model, self.classes, self.args, format = open_model(
            path, build_model, parse_args, self.device
        )
        self.files = folders.collect(inputs, output)
        around = {x if x.is_dir() else x.parent for x in map(Path, inputs)}
        # What training allowed, or what data.json in a folder of images allows.
        limits = [read_format(folder).max_megapixels for folder in around]
        limit = max(format.max_megapixels, *limits)
        self.format = replace(format, max_megapixels=limit)
        self.broken: list[str] = []

    def batches(
        self, read: Read, batch_size: int
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Yield (paths, images (N, C, H, W), float32, normalised, on the device), in order.

        read: makes a tensor (C, H, W) of an image, of one size for all; in other processes.
        """
        for paths, images in self._read_images(read, batch_size):
            yield paths, self.normalize(default_collate(images))

    def images(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, image (C, H, W)), in order, each at its own size, on the CPU: uint8, or
        float32, 0 to 1, with "channels" in data.json.
        """
        # one by one: a batch needs images of one size
        for (path,), (image,) in self._read_images(LazyImage.read, 1):
            yield path, image

    def normalize(self, images: Tensor) -> Tensor:
        """Return `images` (N, C, H, W) of `images()` as the network takes them, on the device."""
        images = images.to(self.device)
        if images.dtype == torch.uint8:  # 0 to 255, the others 0 to 1
            return normalizing.normalize_images(images, self.format)
        return self.format.normalize(images)

    def _read_images(
        self, read: Read, batch_size: int
    ) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Yield (paths, what `read` makes of the images), and note those that are broken."""
        data = Tolerant([path for path, _ in self.files], read, self.format)
        workers = loading.workers(None, torch.device("cpu"))
        # as a list: some samples are a line instead of an image
        loader: DataLoader = DataLoader(data, batch_size, collate_fn=list, **workers)
        # the bar is on a terminal alone
        with tqdm(total=len(data), unit="img", disable=None) as bar:
            for samples in loader:
                paths = []
                images = []
                for path, image in samples:
                    if isinstance(image, str):
                        self.broken.append(image)
                    else:
                        paths.append(path)
                        images.append(image)
                if paths:
                    yield paths, images
                bar.update(len(samples))

    def thresholds(self, given: str) -> Tensor:
        """Return the probability that each label needs, float32 (classes,).

        given: a number for all, or a CSV file with columns class and threshold, as --eval-only
            writes; 0.5 for those that are not in it. Raises a UserError if it is neither.
        """
        with contextlib.suppress(ValueError):
            return torch.full([len(self.classes)], float(given))
        try:
            known = {
                row["class"]: float(row["threshold"])
                for _, row in lists.read_rows(Path(given))
            }
        except (KeyError, ValueError):
            raise UserError(f"{given}: needs the columns class and threshold") from None
        limits = [known.pop(str(files.as_text(name)), 0.5) for name in self.classes]
        if known:
            raise UserError(f"{given}: the checkpoint has no class {shorten([*known])}")
        return torch.tensor(limits)

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
        """Give the block a function that writes a mask and an overlay, after a legend.

        It takes the path of an image, the image (C, H, W), and class numbers, uint8 (H, W), or more
        at the right and below. Raises a UserError if two images have the same name.
        """
        # first of all, so that two of one name are refused before the work begins
        folders.index_by_name(self.files)
        name_of = dict(self.files)

        def save_image(kind: str, path: str, drawn: Image.Image) -> None:
            file = output / kind / f"{name_of[path]}.png"
            with files.writing(file, parents=True) as tmp_path:
                drawn.save(tmp_path, format="png")

        @functools.cache
        def mark() -> None:
            """Make what tells that this folder is no input, also if the rest is not written."""
            for kind in ("masks", "overlays"):
                (output / kind).mkdir(parents=True, exist_ok=True)
            with drawing(output / "legend.png") as figure:
                draw_legend(figure, self.classes, set(range(256)))

        def write_mask(path: str, image: Tensor, mask: Tensor) -> None:
            mark()
            pixels = visible(image).permute(1, 2, 0).numpy()
            height, width = pixels.shape[:2]
            numbers = mask[:height, :width].numpy()  # without what was padded
            tinted = overlay(pixels, numbers, self.classes)
            save_image("masks", path, paint(numbers, self.classes))
            save_image("overlays", path, Image.fromarray(tinted))

        yield write_mask
        self.finish(f"{output / 'masks'}, {output / 'overlays'}")

    def finish(self, where: object) -> None:
        """Print the number of images; list the unreadable ones and exit with status 1 if any."""
        count = len(self.files) - len(self.broken)
        if count == 0:
            where = "no file written"
        distributed.print0(f"{count} of {len(self.files)} images predicted: {where}")
        for line in self.broken:
            print_error(line)
        if self.broken:  # status 1, for scripts, though the others are predicted
            sys.exit(1)


@dataclass
class Tolerant(Dataset):
    """(path, what `read` makes of the image, or a line if it cannot be read)."""

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
            return path, str(error)
