"""python -m ddpkit export --int8: integers of 8 bits, and what they cost."""

import csv
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
from generated import Done, Project
from ranks import Patch


def patch(count: Path) -> None:
    """Say how many images the ranges are from; none may be augmented."""
    from onnxruntime import quantization

    import dataset

    own = quantization.quantize_static

    def quantize(source: Path, path: Path, reader: Any, **options: Any) -> None:
        found = list(iter(reader.get_next, None))
        count.write_text(f"{len(found)} {found[0]['images'].dtype}")
        inputs = iter(found)
        again = SimpleNamespace(get_next=lambda: next(inputs, None))
        own(source, path, again, **options)

    quantization.quantize_static = quantize
    dataset.train_transform = lambda *_: len


def test_int8(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """Ranges from the training set; before and after, the metrics on that for validation."""
    counting = functools.partial(patch, tmp_path / "count")

    def export(data: Path, patch: Patch | None = None) -> Done:
        words = "--checkpoint", trained / "best.pt", "--output", tmp_path, "--int8"
        script = "ddpkit export"
        return project.run(words, "--data", data, script=script, on=1, patch=patch)

    done = export(data, counting).ok()
    assert (tmp_path / "count").read_text() == "53 uint8"
    with open(trained / "metrics.csv", newline="") as file:
        (then,) = csv.DictReader(file)
    table = [line.split() for line in done.out.splitlines()]
    start = table.index(["model.onnx", "model_int8.onnx"])
    for name, before, after in table[start + 1 :]:
        assert abs(float(before) - float(then[name])) < 1e-3
        assert abs(float(after) - float(before)) < 0.1
    assert {row[0] for row in table[start + 1 :]} & {"top1", "miou"}
    nodes = onnx.load(tmp_path / "model_int8.onnx").graph.node
    by_channel = [n for n in nodes if n.op_type == "DequantizeLinear" and n.attribute]
    assert len(by_channel) >= sum(node.op_type == "Conv" for node in nodes) > 9
    small = (tmp_path / "model_int8.onnx").stat().st_size
    large = (tmp_path / "model.onnx").stat().st_size
    assert small < 0.7 * large
    export(tmp_path / "none").refused("places.inner_folders", tmp_path / "none")
