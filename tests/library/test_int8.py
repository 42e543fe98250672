"""Integers of 8 bits: the snippet of docs/export.md."""

import re
import sys
from pathlib import Path

import onnx
import pytest
from generated import ROOT, Command, Project

# exporting a network of free sizes takes minutes
SEGMENTATION = pytest.param("segmentation", marks=pytest.mark.soak)


@pytest.mark.parametrize("project", ["classification", SEGMENTATION], indirect=True)
def test_int8(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """Runs as it stands in the page: weights by channel, a smaller file, the same classes."""
    exported = tmp_path / "exported"
    words = "--checkpoint", trained / "best.pt", "--output", exported, "--data", data
    project.run(words, script="ddpkit export", on=1).ok()
    page = (ROOT / "docs" / "export.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (code,) = [each for each in blocks if "quantize_static" in each]
    (tmp_path / "DIR").symlink_to(data)
    done = Command([sys.executable, "-c", code], tmp_path).end().ok()
    shares = re.findall(r"([\d.]+)% of the classes are as before", done.out)
    assert len(shares) == 10
    assert sum(map(float, shares)) / 10 > 85
    small = onnx.load(exported / "model_int8.onnx")
    nodes = small.graph.node
    by_channel = [n for n in nodes if n.op_type == "DequantizeLinear" and n.attribute]
    assert len(by_channel) >= sum(node.op_type == "Conv" for node in nodes) > 9
    held = {prop.key for prop in small.metadata_props}
    assert held >= {"classes", "size", "mean", "std"}
    sizes = [
        (exported / f"{name}.onnx").stat().st_size for name in ("model_int8", "model")
    ]
    assert sizes[0] < 0.7 * sizes[1]
