"""Export a network: python export.py --checkpoint best.pt --output DIR [--data DIR]

Writes DIR/model.pt2 (torch.export) and DIR/model.onnx, which return what `infer` in model.py does.
Input: `images`, uint8 (N, 3, H, W), RGB, normalised inside; with "channels" in data.json float32
(N, channels, H, W), 0 to 1, normalised inside; of another data set with floats those, as they are.
Output: `logits`, float32. N is free; in segmentation H and W, too: 64 and larger multiples of 32
(pad at the right and below). Both files hold, as JSON, classes, colors, arch, size, multiple_of,
channels, value_range, mean and std. They appear if they return what the network does.
"""

import contextlib
import importlib.util
import io
import json
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ddpkit

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.prepare()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # constants in the files belong to the CPU

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dataset import build_datasets
from ddpkit import files
from ddpkit.data import loading
from ddpkit.data.format import Format
from ddpkit.data.samples import Key
from ddpkit.ranks import distributed
from ddpkit.run import checkpoint, metrics
from flags import parse_args
from model import STRIDE, build_model, infer

ROOT = Path(__file__).resolve().parent
TOLERANCE = 1e-3  # how far logits may differ, as a share of the largest (at least 1)
Predict = Callable[[Tensor], Tensor]


class Network(nn.Module):
    """`infer` with normalisation: images as the data set has them -> logits, float32."""

    def __init__(self, model: nn.Module, format: Format, args: Namespace) -> None:
        super().__init__()
        self.model, self.format, self.args = model, format, args

    def forward(self, images: Tensor) -> Tensor:
        images = loading.normalize(self.format.normalize(images), self.format)
        return metrics.first(infer(self.model, images, self.args))


def main(argv: Sequence[str] | None = None) -> None:
    parser = ddpkit.Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--checkpoint", metavar="FILE", default=ROOT / "runs/default/best.pt")
    add("--output", metavar="DIR", type=Path, default=Path("exported"))
    add("--data", metavar="DIR", type=Path, help="compare on its images (default: as in training)")
    given = parser.parse_args(argv)
    tools = ("onnx", "onnxscript", "onnxruntime")
    if missing := " ".join(name for name in tools if not importlib.util.find_spec(name)):
        raise ddpkit.UserError(f"export.py needs more packages: python -m pip install {missing}")
    warnings.simplefilter("ignore")  # what exporters say is for their authors
    logging.disable()

    model, classes, args, format = checkpoint.open_model(
        given.checkpoint, build_model, parse_args, torch.device("cpu")
    )
    args.data, args.tile = given.data or args.data, 0  # the whole image at once
    network = Network(model.to(memory_format=torch.contiguous_format), format, args).eval()
    batches = pick_batches(args, format)
    with torch.inference_mode():
        expected = [network(batch) for batch in batches]
    metadata = {
        "classes": list(classes),
        "colors": None if classes.colors is None else classes.colors.tolist(),
        "arch": args.arch,
        "size": None if STRIDE else [args.image_size, args.image_size],  # None: any
        "multiple_of": STRIDE,
        "channels": format.channels,  # None: uint8 RGB; else float32, 0 to 1
        "value_range": format.value_range,
        "mean": format.statistics[0],
        "std": format.statistics[1],
    }
    with explaining(f"{args.arch}: torch.export fails"):
        program = trace(network, args.image_size, batches[0])
    for name, write in ("model.pt2", write_pt2), ("model.onnx", write_onnx):
        with files.writing(given.output / name, parents=True) as tmp_path:
            with explaining(f"{args.arch}: cannot become {name}"):
                exported = write(program, tmp_path, metadata)
                difference = compare(exported, batches, expected)
            line = f"{given.output / name}: logits differ by up to {difference:.0e} of the largest"
            if not difference <= TOLERANCE:
                print(f"error: {line}, more than {TOLERANCE:.0e}: not written", file=sys.stderr)
                sys.exit(1)
        print(line)


def pick_batches(args: Namespace, format: Format) -> list[Tensor]:
    """Return batches of 3 images, of 1, and if sizes are free of one that is twice as wide."""
    side = 512 if STRIDE else args.image_size  # pixels, at most
    distributed.setup(alone=True)
    try:
        _, val_set, classes = build_datasets(args)
        samples = ddpkit.Seeded(val_set, classes, seed=0)
        images = [samples[Key(0, i % len(samples), is_val=True)][0] for i in range(3)]
        height, width = (min(side, *(image.shape[axis] for image in images)) for axis in (1, 2))
        batch = torch.stack([image[:, :height, :width] for image in images]).contiguous()
    except ddpkit.UserError as error:
        print(f"comparing on random images; --data DIR names others ({error})")
        batch = torch.randint(256, (3, format.channels or 3, side, side), dtype=torch.uint8)
        batch = batch / 255 if format.channels else batch
    distributed.teardown()
    batches = [batch, batch[:1]]
    return [*batches, torch.cat([batch[1:2], batch[2:]], dim=3)] if STRIDE else batches


def trace(network: nn.Module, side: int, batch: Tensor) -> ExportedProgram:
    """Return `network` as a graph, for any number of images, and any size if STRIDE is set.

    batch: of images such as it takes.
    """
    height, width = (4 * STRIDE, 5 * STRIDE) if STRIDE else (side, side)
    shapes: dict[int, Any] = {0: Dim("batch")}
    if STRIDE:
        rows, columns = Dim("rows", min=2), Dim("columns", min=2)  # some networks refuse 1
        shapes.update({2: STRIDE * rows, 3: STRIDE * columns})
    images = batch.new_zeros(2, batch.shape[1], height, width)  # sizes of 1 would be kept
    return torch.export.export(network, (images,), dynamic_shapes={"images": shapes}, strict=False)


def write_pt2(program: ExportedProgram, path: Path, metadata: Mapping[str, Any]) -> Predict:
    """Write the .pt2 file; return what it holds as a function."""
    content = io.BytesIO()  # torch takes only paths that end in .pt2
    torch.export.save(program, content, extra_files={"metadata.json": json.dumps(metadata)})
    path.write_bytes(content.getbuffer())
    content.seek(0)
    return torch.export.load(content).module()


def write_onnx(program: ExportedProgram, path: Path, metadata: Mapping[str, Any]) -> Predict:
    """Write the .onnx file; return what it holds as a function."""
    import onnxruntime

    names: Any = {"input_names": ["images"], "output_names": ["logits"]}
    exported: Any = torch.onnx.export(program, **names, dynamo=True, verbose=False)
    exported.model.metadata_props.update({k: json.dumps(v) for k, v in metadata.items()})
    exported.save(path, external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextlib.contextmanager
def explaining(what: str) -> Iterator[None]:
    """Turn an error of the exporters in the block into one line, and drop what they print."""
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            yield
    except (OSError, ddpkit.UserError):
        raise
    except Exception as error:  # of many types
        reason = next(iter(str(error).strip().split("\n")))
        raise ddpkit.UserError(f"{what} ({reason or type(error).__name__})") from None


def compare(exported: Predict, batches: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the greatest difference from `expected`, as a share of the largest logit there."""
    pairs = [(exported(batch), logits) for batch, logits in zip(batches, expected, strict=True)]
    shares = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]
    return float(torch.stack(shares).max())  # NaN, if one is


if __name__ == "__main__":
    ddpkit.start(main)
