"""Export a network: python -m ddpkit export --checkpoint best.pt --output DIR

arguments.py says what it does and takes.
"""

import contextlib
import functools
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from ddpkit import files
from ddpkit.data import normalizing
from ddpkit.data.format import Format
from ddpkit.errors import UserError
from ddpkit.ranks import process
from ddpkit.run.outputs import to_logits
from ddpkit.vision.predicting import open_model
from ddpkit.vision.tools import arguments

TOLERANCE = 1e-3  # how far logits may differ, as a share of the largest (at least 1)
Infer = Callable[[nn.Module, Tensor], object]
Predict = Callable[[Tensor], Tensor]


class Network(nn.Module):
    """The network as the file has it: images as the dataset has them -> logits, float32.

    infer: that of model.py, which takes the network and normalised images.
    """

    def __init__(self, model: nn.Module, infer: Infer, format: Format) -> None:
        super().__init__()
        self.model = model
        self.infer = infer
        self.format = format

    def forward(self, images: Tensor) -> Tensor:
        images = self.format.normalize(images)  # floats
        images = normalizing.normalize_images(images, self.format)  # uint8
        return to_logits(self.infer(self.model, images))


def main(argv: Sequence[str] | None = None) -> None:
    given = arguments.EXPORT.parse_args(argv)
    tools = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in tools if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(
            f"export needs more packages: python -m pip install {' '.join(missing)}"
        )
    warnings.simplefilter("ignore")  # what exporters say is for their authors
    logging.disable()
    own = process.own("model")
    stride = own.STRIDE  # none in classification
    parse_args = process.own("flags").parse_args
    model, classes, args, format = open_model(
        given.checkpoint, own.build_model, parse_args, torch.device("cpu")
    )
    used = vars(args)
    used["tile"] = 0  # the file has no tiles
    # channels last would be traced, too
    model = model.to(memory_format=torch.contiguous_format)
    infer = functools.partial(own.infer, args=args)
    network = Network(model, infer, format).eval()
    side = 512 if stride else int(used.get("image_size", 224))  # pixels
    batches = draw_batches(format, stride, side)
    with torch.inference_mode():
        expected = [network(batch) for batch in batches]
    mean, std = format.statistics
    metadata = {
        "classes": list(classes),
        "colors": None if classes.colors is None else classes.colors.tolist(),
        "size": None if stride else [side, side],  # None: any
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
            raise UserError(f"{line}, more than {TOLERANCE:.0e}: no file written")
    print(line)


def draw_batches(format: Format, stride: int, side: int) -> list[Tensor]:
    """Return batches of 3 images, of 1, and if sizes are free of one that is twice as wide."""
    batch = torch.rand(3, format.channels or 3, side, side)
    if not format.channels:
        batch = (255 * batch).byte()
    batches = [batch, batch[:1]]
    if stride:
        batches.append(torch.cat([batch[1:2], batch[2:]], dim=3))
    return batches


def write_onnx(
    network: nn.Module,
    batch: Tensor,
    stride: int,
    path: Path,
    metadata: Mapping[str, object],
) -> Predict:
    """Write `network` for any number of images, with a stride of any size; return it as a function.

    batch: of images such as it takes.
    """
    import onnxruntime

    _, channels, height, width = batch.shape
    shapes: dict[int, object] = {0: Dim("batch")}
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
        raise UserError(f"this model cannot be exported ({reason})") from None


def compare(
    exported: Predict, batches: Sequence[Tensor], expected: Sequence[Tensor]
) -> float:
    """Return the greatest difference from `expected`, as a share of the largest logit there."""
    shares = []
    for batch, logits in zip(batches, expected, strict=True):
        difference = (exported(batch) - logits).abs().max()
        shares.append(difference / logits.abs().max().clamp(min=1))
    return float(torch.stack(shares).max())  # NaN, if one is
