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

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.data import DataLoader

from ddpkit import files
from ddpkit.data import loading
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
        self.infer, self.model, self.format, self.args = infer, model, format, args

    def forward(self, images: Tensor) -> Tensor:
        images = loading.normalize(self.format.normalize(images), self.format)
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
        default=Path("exported"),
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
    if missing := " ".join(
        name for name in tools if not importlib.util.find_spec(name)
    ):
        raise UserError(f"export needs more packages: python -m pip install {missing}")
    warnings.simplefilter("ignore")  # what exporters say is for their authors
    logging.disable()
    own, parse_args = process.own("model"), process.own("flags").parse_args
    stride, now = (
        own.STRIDE,
        {"tile": 0, **({"data": str(given.data)} if given.data else {})},
    )
    model, classes, args, format = checkpoint.open_model(
        given.checkpoint,
        own.build_model,
        lambda words, then: parse_args(words, {**then, **now}),
        CPU,
    )
    model = model.to(memory_format=torch.contiguous_format)
    network = Network(own.infer, model, format, args).eval()
    side = 512 if stride else int(vars(args).get("image_size", 224))  # pixels, at most
    distributed.setup(alone=True)
    sets = build_sets(args, format, is_needed=given.int8)
    batches = pick_batches(sets, format, stride, side)
    with torch.inference_mode():
        expected = [network(batch) for batch in batches]
    metadata = {
        "classes": list(classes),
        "colors": None if classes.colors is None else classes.colors.tolist(),
        "size": None if stride else [*batches[0].shape[2:]],  # None: any
        "multiple_of": stride,
        # crop: of the shorter side
        **{name: vars(args).get(name) for name in ("arch", "crop")},
        "channels": format.channels,  # None: uint8 RGB; else float32, 0 to 1
        "value_range": format.value_range,
        "mean": format.statistics[0],
        "std": format.statistics[1],
    }
    path = given.output / "model.onnx"
    with files.writing(path, parents=True) as tmp_path, explaining():
        exported = write(network, batches[0], stride, tmp_path, metadata)
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
        return print(f"comparing on random images; --data DIR names others ({error})")
    train_set = copy.copy(train_set)
    vars(train_set).update(
        {k: v for k, v in vars(val_set).items() if k.startswith("transform")}
    )
    if count := format.channels:  # the file normalises
        train_set.format = val_set.format = replace(
            format, mean=(0.0,) * count, std=(1.0,) * count
        )
    return train_set, val_set, classes


def pick_batches(
    sets: Sets | None, format: Format, stride: int, side: int
) -> list[Tensor]:
    """Return batches of 3 images, of 1, and if sizes are free of one that is twice as wide."""
    if sets:
        samples = Seeded(sets[1], sets[2], seed=0)
        images = [samples[Key(0, i % len(samples), is_val=True)][0] for i in range(3)]
        height, width = (
            min(side, *(image.shape[axis] for image in images)) for axis in (1, 2)
        )
        batch = torch.stack(
            [image[:, :height, :width] for image in images]
        ).contiguous()
    else:
        batch = torch.randint(
            256, (3, format.channels or 3, side, side), dtype=torch.uint8
        )
        batch = batch / 255 if format.channels else batch
    batches = [batch, batch[:1]]
    return [*batches, torch.cat([batch[1:2], batch[2:]], dim=3)] if stride else batches


def write(
    network: nn.Module,
    batch: Tensor,
    stride: int,
    path: Path,
    metadata: Mapping[str, Any],
) -> Predict:
    """Write `network` for any number of images, with a stride of any size; return it as a function.

    batch: of images such as it takes.
    """
    height, width = (4 * stride, 5 * stride) if stride else batch.shape[2:]
    shapes: dict[int, Any] = {0: Dim("batch")}
    if stride:
        # some networks refuse 1
        rows, columns = Dim("rows", min=2), Dim("columns", min=2)
        shapes.update({2: stride * rows, 3: stride * columns})
    # sizes of 1 would be kept
    images = batch.new_zeros(2, batch.shape[1], height, width)
    program = torch.export.export(
        network, (images,), dynamic_shapes=(shapes,), strict=False
    )
    names: Any = {"input_names": ["images"], "output_names": ["logits"]}
    exported: Any = torch.onnx.export(program, **names, dynamo=True, verbose=False)
    exported.model.metadata_props.update(
        {k: json.dumps(v) for k, v in metadata.items()}
    )
    exported.save(path, external_data=False)
    return load(path)


def load(path: Path) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )
    return lambda images: torch.from_numpy(
        session.run(None, {"images": images.numpy()})[0]
    )


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Turn an error of the exporters in the block into one line, and drop what they print."""
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            yield
    except (OSError, UserError):
        raise
    except Exception as error:  # of many types
        reason = next(iter(str(error).strip().split("\n")))
        line = f"this network cannot be exported ({reason or type(error).__name__})"
        raise UserError(line) from None


def compare(
    exported: Predict, batches: Sequence[Tensor], expected: Sequence[Tensor]
) -> float:
    """Return the greatest difference from `expected`, as a share of the largest logit there."""
    pairs = [
        (exported(batch), logits)
        for batch, logits in zip(batches, expected, strict=True)
    ]
    shares = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]
    return float(torch.stack(shares).max())  # NaN, if one is


def quantize(source: Path, path: Path, sets: Sets, args: Namespace) -> None:
    """Write the network in `source` with integers of 8 bits as `path`; print metrics of both."""
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    def samples(part: Seeded, numbers: Tensor) -> DataLoader:
        keys: Any = [Key(0, number, is_val=True) for number in numbers.tolist()]
        return DataLoader(part, sampler=keys, **loading.workers(None, CPU))

    train, val = (Seeded(each, sets[2], seed=0) for each in sets[:2])
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    inputs = (
        {"images": images.numpy()} for images, *_ in samples(train, order[:CALIBRATION])
    )
    reader = SimpleNamespace(get_next=lambda: next(inputs, None))
    with (
        files.writing(path) as tmp_path,
        tempfile.TemporaryDirectory() as folder,
        explaining(),
    ):
        prepared, quantized = Path(folder, "prepared.onnx"), Path(folder, "int8.onnx")
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        more = {"ActivationSymmetric": True}  # TensorRT takes no other zero points
        quantize_static(
            prepared, quantized, reader, per_channel=True, extra_options=more
        )
        # onnxruntime writes to files with a name only
        shutil.copyfile(quantized, tmp_path)
    networks = [load(each) for each in (source, path)]
    found = [process.own("model").build_metrics(args, sets[2]) for _ in networks]
    for images, targets, *_ in samples(val, torch.arange(len(val))):
        targets = targets if targets.is_floating_point() else targets.long()
        for network, each in zip(networks, found, strict=True):
            each.update(network(images), targets)
    before, after = (metrics.compute(each)[0] for each in found)
    print(f"{'':20} {source.name:>15} {path.name:>15}")
    for name, value in before.items():
        print(f"{name:20} {value:15.4f} {after[name]:15.4f}")
