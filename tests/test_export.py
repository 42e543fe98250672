"""What a trained network becomes, by ddpkit export, and what it may come from, by --weights."""

from pathlib import Path

import pytest
import torch
from running import SAME_FOR_BOTH, SCRIPTS, Done, Project
from torch import nn

from ddpkit.errors import UserError
from ddpkit.run import pretrained


def test_exported(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """On other numbers of images than were tried, and on other sizes, with all that it takes."""
    best, out = trained / "best.pt", tmp_path / "out"
    words = ["--checkpoint", best, "--output", out, "--data", data]
    done = project.alone(*words, script="ddpkit export").ok()
    (line,) = (line for line in done.out.splitlines() if "logits differ by" in line)
    assert line.startswith(f"{out}/model.onnx: logits differ by up to ")
    assert done.err == ""
    assert [path.name for path in out.iterdir()] == ["model.onnx"]
    is_free = project.task == "segmentation"
    shapes = [[5, 3, 96, 160], [1, 3, 64, 96]] if is_free else [[5, 3, 64, 64]]
    found = project.call("exporting.used", out, best, shapes)
    assert len(found["apart"]) == len(shapes)
    for apart, largest in zip(found["apart"], found["largest"], strict=True):
        assert apart < 1e-3 * max(largest, 1)
    assert found["type"] == "float32"
    held = found["metadata"]
    assert held["classes"] == found["classes"]
    assert held["arch"] == found["arch"]
    assert held["size"] == (None if is_free else [found["image_size"]] * 2)
    assert held["multiple_of"] == (32 if is_free else None)
    assert held["mean"] == [0.485, 0.456, 0.406]
    assert held["std"] == [0.229, 0.224, 0.225]


@SAME_FOR_BOTH
def test_what_is_not_exported(project: Project, trained: Path, tmp_path: Path) -> None:
    """A broken checkpoint; a network that torch.export cannot follow; a difference."""

    def export(path: Path, script: str | Path = "ddpkit export") -> Done:
        words = ["--checkpoint", path, "--output", tmp_path / "out"]
        return project.alone(*words, script=script)

    broken = tmp_path / "broken.pt"
    broken.write_bytes((trained / "best.pt").read_bytes()[:5000])
    export(broken).refused("broken.pt", "not a readable checkpoint")
    export(trained / "best.pt", SCRIPTS / "export_control_flow.py").refused("cannot be exported")
    done = export(trained / "best.pt", SCRIPTS / "export_other.py")
    done.refused("model.onnx", "more than 1e-03: not written")
    assert not list(tmp_path.rglob("model.*"))


class Wrapped(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class TestWeights:
    @pytest.mark.parametrize("wrap", ["", "module.", "_orig_mod.", "module._orig_mod.", "net."])
    @pytest.mark.parametrize("keys", [[], ["model"], ["state_dict"], ["state_dict", "model"]])
    @pytest.mark.parametrize("is_wrapped", [False, True])
    def test_files(
        self,
        wrap: str,
        keys: list[str],
        is_wrapped: bool,
        tmp_path: Path,
        capsys: pytest.CaptureFixture,
    ) -> None:
        """As other programs save them, for a network as it is and in a wrapper of ours."""
        torch.manual_seed(0)
        weights = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 9)).state_dict()
        state: dict = {f"{wrap}{name}": value for name, value in weights.items()}
        for key in keys:
            state = {key: state, "epoch": 3, "optimizer": {"state": {}}}
        torch.save(state, tmp_path / "file.pt")
        net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
        model = Wrapped(net) if is_wrapped else net
        pretrained.copy_matching(model, pretrained.read(f"{tmp_path}/file.pt"))
        assert torch.equal(net[0].weight, weights["0.weight"])
        prefix = "net." if is_wrapped else ""
        new = f"new: {prefix}2.weight, {prefix}2.bias"
        assert capsys.readouterr().out == f"--weights: 7 of 9 tensors loaded; {new}\n"

    def test_files_that_do_not_fit(self, tmp_path: Path) -> None:
        torch.save({"state_dict": {"a.weight": torch.ones(1)}}, tmp_path / "other.pt")
        words = r"begins with weight; the file begins with a\.weight"
        with pytest.raises(UserError, match=words):
            pretrained.copy_matching(nn.Linear(2, 2), pretrained.read(f"{tmp_path}/other.pt"))
        torch.save({"model": nn.Linear(2, 2)}, tmp_path / "objects.pt")
        with pytest.raises(UserError, match=r"more than plain types.*weights_only"):
            pretrained.read(f"{tmp_path}/objects.pt")
