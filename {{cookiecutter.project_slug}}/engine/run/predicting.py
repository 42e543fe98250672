"""Which images a network takes, large ones in tiles, and the images of predict.py."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

from engine import files
from engine.data import bit_depth, folders, loading
from engine.data.format import Format, read_format
from engine.data.images import LazyImage, open_image
from engine.errors import UserError, print_error
from engine.ranks import devices, distributed, failures, process
from engine.run import checkpoint, machine
from engine.run.metrics import first
from engine.run.pictures import draw_legend, drawing, overlay, paint

Read = Callable[[LazyImage], Tensor]
Predict = Callable[[Tensor], Tensor]  # (1, 3, h, w) -> logits (1, classes, h, w)

OVERLAP = 256  # pixels that neighbouring tiles share at least; half a tile if that is less
ERRORS = (AssertionError, RuntimeError, ValueError)  # of networks, about sizes


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
        self.found = folders.collect(inputs)
        folders.say_skipped()
        # Beside what training allowed, what data.json in a folder of images allows.
        places = {path if path.is_dir() else path.parent for path in map(Path, inputs)}
        limit = max(read_format(folder).max_megapixels for folder in places)
        self.format = replace(format, max_megapixels=max(format.max_megapixels, limit))
        self.broken: list[str] = []

    def batches(self, read: Read, batch_size: int) -> Iterator[tuple[list[str], Tensor]]:
        """Yield (paths, images (N, C, H, W), float32, normalised, on the device), in order.

        read: returns what an image becomes, a tensor (C, H, W) of the same size for all: uint8, or
            floats; it is called in other processes.
        """
        for paths, images in self._read(read, batch_size):
            yield paths, self.normalize(default_collate(images))

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

    def _read(self, read: Read, batch_size: int) -> Iterator[tuple[list[str], list[Tensor]]]:
        workers = machine.default_workers()
        loader: DataLoader = DataLoader(
            Tolerant([path for path, _ in self.found], read, self.format),
            batch_size,
            num_workers=workers,
            multiprocessing_context=process.worker_context(workers),
            worker_init_fn=process.start_worker,
            collate_fn=list,
        )
        with tqdm(total=len(self.found), unit="img", disable=None) as bar:
            for samples in loader:
                whole = [(path, image) for path, image in samples if isinstance(image, Tensor)]
                if whole:
                    yield [path for path, _ in whole], [image for _, image in whole]
                self.broken += [line for _, line in samples if isinstance(line, str)]
                bar.update(len(samples))

    @contextlib.contextmanager
    def skipping(self, path: str, remedy: str) -> Iterator[None]:
        """Leave the block if it runs out of memory; the image then counts as one of the others.

        remedy: what to do about it.
        """
        try:
            yield
        except Exception as error:
            if not (what := failures.out_of_memory(error)):
                raise
            self.broken.append(f"{path}: out of {what}; {remedy}")

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
        name_of = {path: name for name, path in folders.by_name(self.found).items()}

        def write(path: str, image: Tensor, mask: Tensor) -> None:
            pixels = bit_depth.visible(image).permute(1, 2, 0).numpy()
            numbers = mask[: len(pixels), : pixels.shape[1]].numpy()
            tinted = Image.fromarray(overlay(pixels, numbers, self.classes))
            for kind, drawn in ("masks", paint(numbers, self.classes)), ("overlays", tinted):
                file = output / kind / f"{name_of[path]}.png"
                with files.writing(file, parents=True) as tmp_path:
                    drawn.save(tmp_path, format="png")

        yield write
        if len(self.broken) < len(self.found):
            with drawing(output / "legend.png", "tight") as figure:
                draw_legend(figure, self.classes, {*range(256)}, (0, 0))
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


class Tolerant(Dataset):
    """(path, what `read` makes of the image), or a line for one that cannot be read."""

    def __init__(self, paths: Sequence[str], read: Read, format: Format) -> None:
        self.paths, self.read, self.format = paths, read, format

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


def in_tiles(predict: Predict, images: Tensor, tile: int, step: int) -> Tensor:
    """Return the logits of `images` (N, 3, H, W), float32 (N, classes, H, W).

    predict: takes images of any size, as a network's `forward` does.
    tile: side in pixels of the overlapping tiles in which larger images are predicted, one after
        another; smaller ones are predicted whole, all at once. 0: always whole.
    step: tiles begin at multiples of it, as the cells of a network of that stride do.

        logits = engine.in_tiles(model.forward, images, args.tile, STRIDE)
    """
    check(tile, step)
    if not 0 < tile < max(images.shape[-2:]):
        return predict(images)
    found = torch.empty(0)
    for number, image in enumerate(images):
        for rows, logits in bands(predict, image, tile, step):
            if not len(found):
                found = logits.new_empty(len(images), len(logits), *image.shape[1:])
            found[number, :, rows] = logits
    return found


def bands(predict: Predict, image: Tensor, tile: int, step: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their logits) of `image` (3, H, W), from the top to the last row.

    tile: side of the tiles in pixels, at most that of the image; 0: the whole image at once.
    step: tiles begin at multiples of it, as the cells of a network of that stride do.
    The logits are float32 (classes, rows, W); where tiles overlap, a weighted mean of theirs.

        for rows, logits in engine.bands(model.forward, image, 1024, STRIDE):
            mask[rows] = logits.argmax(0)
    """
    check(tile, step)
    height, width = image.shape[1:]
    rows, columns = (arrange(side, tile or side, step) for side in (height, width))
    if len(rows) == len(columns) == 1:
        yield slice(0, height), first(predict(image[None]))[0]
        return
    ends = [top for top, _ in rows[1:]] + [height]
    rest = torch.empty(0, 0)  # logits below the last band, as far as tiles have reached
    for (top, down), end in zip(rows, ends, strict=True):
        band = torch.empty(0)
        for left, across in columns:
            part = image[None, :, top : top + len(down), left : left + len(across)]
            logits = first(predict(part))[0]
            if not len(band):
                band = logits.new_zeros(len(logits), len(down), width)
            weights = (down[:, None] * across).to(logits.device)
            band[:, :, left : left + len(across)] += logits * weights
        if rest.shape[1]:
            band[:, : rest.shape[1]] += rest
        rest = band[:, end - top :].clone()
        yield slice(top, end), band[:, : end - top]


def check(tile: int, step: int) -> None:
    """Raise a UserError unless tiles of that side overlap on a grid of `step` pixels."""
    if tile and (tile % step or tile < 4 * step):
        raise UserError(f"--tile {tile} is not 0 or a multiple of {step} from {4 * step} up")


def arrange(side: int, tile: int, step: int) -> list[tuple[int, Tensor]]:
    """Return (start, weights) of the tiles along a `side`; the weights of a pixel add up to 1.

    Tiles have one size and are spread evenly. Within a quarter of the overlap from a tile's edge,
    where the network lacks the surroundings, its neighbour counts alone; further in, weights rise.
    """
    tile = min(tile, side)
    overlap = min(OVERLAP, tile // 2)
    gaps = -(-(side - tile) // (tile - overlap))
    starts = [(side - tile) * i // gaps // step * step for i in range(gaps)] + [side - tile]
    to_edge = torch.arange(1.0, tile + 1)
    to_edge = torch.minimum(to_edge, to_edge.flip(0))
    weights = (to_edge - overlap / 4).clamp(min=1e-6)  # not 0: the image's own edges need it
    total = torch.zeros(side)
    for start in starts:
        total[start : start + tile] += weights
    return [(start, weights / total[start : start + tile]) for start in starts]


def fit_input(build: Callable[[], nn.Module], size: int, channels: int = 3) -> nn.Module:
    """Return the network that `build` makes, whose first convolution takes so many channels.

    size: side of the training images in pixels. The network has to take float32 (N, channels, size,
    size); if its first convolution is for RGB and `channels` are not 3, that one is replaced.

    Raises a UserError if it cannot take such images; to find out takes no time.

        model = engine.fit_input(lambda: Net(len(classes)), args.image_size, channels)
    """
    try:
        model = set_channels(build(), channels)
        forward(model, size, channels)
    except ERRORS as error:
        raise UserError(
            f"--image-size {size}: this network cannot take such images "
            f"({' '.join(str(error).split())}); use another size, such as 224"
        ) from None
    return model


def set_channels(model: nn.Module, channels: int) -> nn.Module:
    """Have the first convolution of `model`, if it is for RGB, take so many channels instead."""
    first = next((each for each in model.modules() if isinstance(each, nn.Conv2d)), None)
    if first is not None and first.in_channels == 3 != channels:
        first.in_channels = channels
        shape = first.out_channels, channels, *first.kernel_size
        first.weight = nn.Parameter(first.weight.new_empty(shape))
        first.reset_parameters()
    return model


def freeze_unused(model: nn.Module, step: int, channels: int = 3) -> nn.Module:
    """Freeze the weights of `model` that its output does not depend on; return it.

    Some encoders have layers that no decoder reads; DDP would wait for their gradients.
    step: of the sides of images, float32 (N, channels, i * step, j * step), which `model` takes.

    Raises a UserError if it does not.

        model = engine.freeze_unused(smp.create_model("unet", "mobilenet_v2"), 32)
    """
    side = 5 * step
    try:
        output, weights = forward(model, side, channels)
    except ERRORS as error:
        raise UserError(
            f"this network cannot take images of {side} x {side} pixels "
            f"({' '.join(str(error).split())}), but validation pads images to multiples of {step}: "
            "choose another"
        ) from None
    gradients = torch.autograd.grad(output.sum(), weights, allow_unused=True)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight.requires_grad_(gradient is not None)
    return model


def forward(model: nn.Module, size: int, channels: int = 3) -> tuple[Tensor, list[Tensor]]:
    """Return the output for an image of `size` x `size` pixels, and the weights that it is made of.

    In evaluation mode, on the device meta, without numbers; `model` stays where it is.
    """
    was_training = model.training
    for device in ("meta", "cpu"):
        weights = {n: w.detach().to(device).requires_grad_() for n, w in model.named_parameters()}
        buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
        image = torch.zeros(1, channels, size, size, device=device)
        try:
            output = functional_call(model.eval(), {**weights, **buffers}, image)
            break
        except RuntimeError as error:
            # A layer needs numbers, or the network decides by some.
            on_meta = isinstance(error, NotImplementedError) or "meta tensors" in str(error)
            if device == "cpu" or not on_meta:
                raise
        finally:
            model.train(was_training)
    return output, [*weights.values()]


def explain(error: Exception) -> UserError | None:
    """Return a line for an `error` of BatchNorm, which needs two values per channel to train."""
    line = "BatchNorm has a single value per channel to train on: use --batch-size 2 or more, or a "
    is_known = "Expected more than 1 value per channel when training" in str(error)
    return UserError(line + "larger --image-size") if is_known else None
