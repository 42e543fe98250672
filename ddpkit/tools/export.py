"""Export a network: python -m ddpkit export --checkpoint best.pt --output DIR [--data DIR]

Writes DIR/model.onnx, which returns what `infer` in model.py does.
Input: `images`, uint8 (N, 3, H, W), RGB, normalised inside; with "channels" in data.json float32
(N, channels, H, W), 0 to 1, normalised inside; of another data set with floats those, as they are.
Output: `logits`, float32. N is free; in segmentation H and W, too: 64 and larger multiples of 32
(pad at the right and below). The file holds, as JSON, classes, colors, arch, size, multiple_of,
channels, value_range, mean and std. It appears if it returns what the network does.

--int8 also writes DIR/model_int8.onnx, which computes in integers of 8 bits, with ranges that 128
training images show, and prints the metrics of both files on the validation set.
"""

import contextlib
import copy
import importlib.util
import io
import json
import logging
import shutil
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.data import DataLoader

from ddpkit import files
from ddpkit.data import loading, normalizing
from ddpkit.data.format import Format
from ddpkit.data.samples import Key, MapDataset, Seeded
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, process
from ddpkit.run import checkpoint, metrics
from ddpkit.run.flags import Parser
from ddpkit.run.outputs import to_logits

TOLERANCE = 1e-3  # how far logits may differ, as a share of the largest (at least 1)
CALIBRATION = 128  # training images whose values give the ranges of --int8
CPU = torch.device("cpu")
Predict = Callable[[Tensor], Tensor]
# for training, for validation, classes
Sets = tuple[MapDataset, MapDataset, Sequence[str]]


class Network(nn.Module):
    """`infer` with normalisation: images as the data set has them -> logits, float32."""

    def __init__(
        self, infer: Any, model: nn.Module, format: Format, args: Namespace
    ) -> None:
        super().__init__()
        self.infer = infer
        self.model = model
        self.format = format
        self.args = args

    def forward(self, images: Tensor) -> Tensor:
        images = normalizing.normalize_images(
            self.format.normalize(images), self.format
        )
        return to_logits(self.infer(self.model, images, self.args))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m ddpkit export", description=__doc__)
    add = parser.add_argument
    add(
        "--checkpoint",
        metavar="FILE",
        default="runs/default/best.pt",
        help="of the network",
    )
    add(
        "--output",
        metavar="DIR",
        type=Path,
        default="exported",
        help="for model.onnx",
    )
    add(
        "--data",
        metavar="DIR",
        type=Path,
        help="compare on its images (default: as in training)",
    )
    add(
        "--int8",
        action="store_true",
        help="also write model_int8.onnx; needs the data set",
    )
    given = parser.parse_args(argv)
    tools = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in tools if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(
            f"export needs more packages: python -m pip install {' '.join(missing)}"
        )
    warnings.simplefilter("ignore")  # what exporters say is for their authors
    logging.disable()
    own = process.own("model")
    stride = own.STRIDE  # 0 in classification
    now: dict[str, object] = {"tile": 0}  # the file has no tiles
    if given.data:
        now["data"] = str(given.data)

    def parse_args(words: Sequence[str], then: Mapping[str, object]) -> Namespace:
        return process.own("flags").parse_args(words, {**then, **now})

    model, classes, args, format = checkpoint.open_model(
        given.checkpoint, own.build_model, parse_args, CPU
    )
    used = vars(args)
    # channels last would be traced, too
    model = model.to(memory_format=torch.contiguous_format)
    network = Network(own.infer, model, format, args).eval()
    side = 512 if stride else int(used.get("image_size", 224))  # pixels, at most
    distributed.setup(alone=True)
    sets = build_sets(args, format, is_needed=given.int8)
    batches = pick_batches(sets, format, stride, side)
    with torch.inference_mode():
        expected = [network(batch) for batch in batches]
    mean, std = format.statistics
    metadata = {
        "classes": list(classes),
        "colors": None if classes.colors is None else classes.colors.tolist(),
        "size": None if stride else list(batches[0].shape[2:]),  # None: any
        "multiple_of": stride,
        "arch": used.get("arch"),
        "crop": used.get("crop"),  # a share of the shorter side; None: the whole image
        "channels": format.channels,  # None: uint8 RGB; else float32, 0 to 1
        "value_range": format.value_range,
        "mean": mean,
        "std": std,
    }
    path = given.output / "model.onnx"
    # a file that returns something else is not kept: an error leaves the old one
    with files.writing(path, parents=True) as tmp_path, refusing():
        exported = write_onnx(network, batches[0], stride, tmp_path, metadata)
        difference = compare(exported, batches, expected)
        line = f"{path}: logits differ by up to {difference:.0e} of the largest"
        if not difference <= TOLERANCE:
            raise UserError(f"{line}, more than {TOLERANCE:.0e}: not written")
    print(line)
    if given.int8 and sets:
        quantize(path, path.with_name("model_int8.onnx"), sets, args)
    distributed.teardown()


def build_sets(args: Namespace, format: Format, is_needed: bool) -> Sets | None:
    """Return the sets for training, with images as for validation, and for validation; classes."""
    try:
        train_set, val_set, classes = process.own("dataset").build_datasets(args)
    except UserError as error:
        if is_needed:
            raise
        # the network can be written without its data
        print(f"comparing on random images; --data DIR names others ({error})")
        return None
    train_set = copy.copy(train_set)
    for name, value in vars(val_set).items():
        if name.startswith("transform"):
            setattr(train_set, name, value)
    count = format.channels
    if count:  # the file normalises
        as_they_are = replace(format, mean=(0.0,) * count, std=(1.0,) * count)
        train_set.format = as_they_are
        val_set.format = as_they_are
    return train_set, val_set, classes


def pick_batches(
    sets: Sets | None, format: Format, stride: int, side: int
) -> list[Tensor]:
    """Return batches of 3 images, of 1, and if sizes are free of one that is twice as wide."""
    if sets:
        _, val_set, classes = sets
        samples = Seeded(val_set, classes, seed=0)
        keys = [Key(0, i % len(samples), is_val=True) for i in range(3)]
        images = [samples[key][0] for key in keys]
        # images may differ in size: the part that all have
        height = min(side, min(image.shape[1] for image in images))
        width = min(side, min(image.shape[2] for image in images))
        parts = [image[:, :height, :width] for image in images]
        batch = torch.stack(parts).contiguous()
    else:
        shape = (3, format.channels or 3, side, side)
        batch = torch.randint(256, shape, dtype=torch.uint8)
        if format.channels:
            batch = batch / 255
    batches = [batch, batch[:1]]
    if stride:
        batches.append(torch.cat([batch[1:2], batch[2:]], dim=3))
    return batches


def write_onnx(
    network: nn.Module,
    batch: Tensor,
    stride: int,
    path: Path,
    metadata: Mapping[str, Any],
) -> Predict:
    """Write `network` for any number of images, with a stride of any size; return it as a function.

    batch: of images such as it takes.
    """
    _, channels, height, width = batch.shape
    shapes: dict[int, Any] = {0: Dim("batch")}
    if stride:
        # two sizes, or the exporter would take them for the same one
        height = 4 * stride
        width = 5 * stride
        # some networks refuse 1
        shapes[2] = stride * Dim("rows", min=2)
        shapes[3] = stride * Dim("columns", min=2)
    # two images: sizes of 1 would be kept
    images = batch.new_zeros(2, channels, height, width)
    program = torch.export.export(
        network, (images,), dynamic_shapes=(shapes,), strict=False
    )
    exported: Any = torch.onnx.export(
        program,
        input_names=["images"],
        output_names=["logits"],
        dynamo=True,
        verbose=False,
    )
    for name, value in metadata.items():
        exported.model.metadata_props[name] = json.dumps(value)
    exported.save(path, external_data=False)  # in one file
    return open_session(path)


def open_session(path: Path) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )

    def predict(images: Tensor) -> Tensor:
        (logits,) = session.run(None, {"images": images.numpy()})
        return torch.from_numpy(logits)

    return predict


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn an error of the exporters in the block into one line, and drop what they print."""
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            yield
    except (OSError, UserError):  # of the disk, or of the comparison
        raise
    except Exception as error:  # of many types
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"this network cannot be exported ({reason})") from None


def compare(
    exported: Predict, batches: Sequence[Tensor], expected: Sequence[Tensor]
) -> float:
    """Return the greatest difference from `expected`, as a share of the largest logit there."""
    shares = []
    for batch, logits in zip(batches, expected, strict=True):
        difference = (exported(batch) - logits).abs().max()
        shares.append(difference / logits.abs().max().clamp(min=1))
    return float(torch.stack(shares).max())  # NaN, if one is


def quantize(source: Path, path: Path, sets: Sets, args: Namespace) -> None:
    """Write the network in `source` with integers of 8 bits as `path`; print metrics of both."""
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    train_set, val_set, classes = sets
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(train_set), generator=generator)[:CALIBRATION]
    batches = iter(read_samples(train_set, classes, order.tolist()))

    def get_next() -> dict[str, np.ndarray] | None:
        batch = next(batches, None)
        return None if batch is None else {"images": batch[0].numpy()}

    reader = SimpleNamespace(get_next=get_next)  # a CalibrationDataReader
    with (
        files.writing(path) as tmp_path,
        tempfile.TemporaryDirectory() as folder,
        refusing(),
    ):
        # onnxruntime writes to files with a name only
        prepared = Path(folder, "prepared.onnx")
        quantized = Path(folder, "int8.onnx")
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        more = {"ActivationSymmetric": True}  # TensorRT takes no other zero points
        quantize_static(
            prepared, quantized, reader, per_channel=True, extra_options=more
        )
        shutil.copyfile(quantized, tmp_path)
    val = read_samples(val_set, classes, range(len(val_set)))
    build_metrics = process.own("model").build_metrics
    collections = [build_metrics(args, classes) for _ in range(2)]
    before, after = measure([source, path], val, collections)
    print(f"{'':20} {source.name:>15} {path.name:>15}")
    for name, value in before.items():
        print(f"{name:20} {value:15.4f} {after[name]:15.4f}")


def read_samples(
    dataset: MapDataset, classes: Sequence[str], numbers: Sequence[int]
) -> DataLoader:
    """Return a loader of the samples of these `numbers`, one by one, as for validation."""
    keys: Any = [Key(0, number, is_val=True) for number in numbers]
    part = Seeded(dataset, classes, seed=0)
    return DataLoader(part, sampler=keys, **loading.workers(None, CPU))


def measure(
    paths: Sequence[Path], loader: DataLoader, collections: Sequence[Any]
) -> list[dict[str, float]]:
    """Return the metrics of the network in each file, each in its collection of build_metrics."""
    networks = [open_session(path) for path in paths]
    for batch in loader:
        targets = batch[1]
        if not targets.is_floating_point():
            targets = targets.long()  # as training has them
        for predict, collection in zip(networks, collections, strict=True):
            collection.update(predict(batch[0]), targets)
    return [metrics.compute_metrics(collection)[0] for collection in collections]
