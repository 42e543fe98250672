"""Runs on data that is unusual: broken, of 12 bits, of five channels, in colours."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tifffile
import torch
from generated import Project, both_but_one_in_soak, both_tasks, rows
from PIL import Image

from ddpkit.data.format import MEAN, STD

GREY = {"photometric": "minisblack"}


def test_a_broken_image(project: Project, own_data: Path, tmp_path: Path) -> None:
    """One line, of a loader worker, too; all ranks end, and no epoch is saved."""
    path = own_data / "train/dots/0002.jpg"
    path.write_bytes(path.read_bytes()[:300])
    done = project.train(own_data, tmp_path / "out", "--workers", 1)
    done.refused("images.reading", path)
    assert not (tmp_path / "out" / "best.pt").exists()


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_void(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Without any label in the validation set there is nothing to evaluate."""
    for path in (own_data / "val" / "masks").iterdir():
        Image.fromarray(np.full(Image.open(path).size[::-1], 255, np.uint8)).save(path)
    project.train(own_data, tmp_path / "out", on=1).refused("main.evaluate")


def test_12_bits(project: Project, own_data: Path, tmp_path: Path) -> None:
    """In files of 16: refused without a range; predicted as they were trained."""
    paths = sorted(own_data.glob("train/*/*"))
    for path in paths:
        grey = np.asarray(Image.open(path).convert("L")).astype(np.uint16) << 4
        Image.fromarray(grey).save(path.with_suffix(".tif"))
        path.unlink()
    out = tmp_path / "out"
    said = own_data / "data.json"
    project.train(own_data, out).refused("images.ends", ".tif", '"value_range"')
    said.write_text('{"value_range": [0, 4095]}')
    project.train(own_data, out).ok()
    words = [paths[0].with_suffix(".tif"), "--checkpoint", out / "best.pt"]
    words += ["--output", tmp_path / "p"]
    project.run(words, script="predict.py", on=1).ok()


def draw_channels(root: Path, task: str) -> np.ndarray:
    """Draw TIFFs of five channels of 16 bits; return the values of those for training."""
    is_dense = task == "segmentation"
    noise = np.random.default_rng(0).integers(0, 6000, (40, 52, 5)).astype(np.uint16)
    found = []
    for part, count in ("train", 12), ("val", 5):
        for i in range(count):
            mask = np.zeros((40, 52), np.uint8)
            mask[10:30, i : i + 20] = 1
            values = noise + np.uint16(i + count)  # no image comes twice
            values[..., 4] += 3000 * (mask.astype(np.uint16) if is_dense else i % 2)
            path = root / part / ("images" if is_dense else f"class {i % 2}")
            path.mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(path / f"{i}.tif", values, planarconfig="contig", **GREY)
            if part == "train":
                found.append(values.reshape(-1, 5))
            if is_dense:
                (root / part / "masks").mkdir(exist_ok=True)
                Image.fromarray(mask).save(root / part / "masks" / f"{i}.png")
    return np.concatenate(found) / 65535


@both_tasks
def test_other_mean_and_std(project: Project, few: Path, tmp_path: Path) -> None:
    """Two lines are edited: training, validation and the checkpoint follow."""
    own = project.copy(tmp_path / "copy")
    mean = (0.1, 0.2, 0.3)
    std = (0.4, 0.5, 0.6)
    text = (own.folder / "dataset.py").read_text()
    for name, then, now in ("MEAN", MEAN, mean), ("STD", STD, std):
        assert text.count(f"{name} = {then}\n") == 1
        text = text.replace(f"{name} = {then}\n", f"{name} = {now}\n")
    (own.folder / "dataset.py").write_text(text)
    out = tmp_path / "out"
    own.train(few, out, on=1).ok()
    state = torch.load(out / "best.pt", weights_only=True)["format"]
    assert tuple(state["mean"]) == mean
    assert tuple(state["std"]) == std
    done = project.train(few, out, "--eval-only", on=1)
    done.refused("checkpoint.check_format", mean, MEAN)
    own.train(few, out, "--eval-only", on=1).ok()


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
def test_five_channels(project: Project, tmp_path: Path) -> None:
    """What the check writes trains, resumes, evaluates, predicts and is exported."""
    data = tmp_path / "set"
    out = tmp_path / "out"
    values = draw_channels(data, project.task)
    is_dense = project.task == "segmentation"
    net = ["--batch-size", 3]
    if not is_dense:
        net += ["--arch", "squeezenet1_1"]
    done = project.train(data, out, net, on=1)
    done.refused("images.reading", "0.tif", '"channels"')
    (data / "data.json").write_text('{"channels": 5, "value_range": [0, 65535]}')
    done = project.train(data, out, net, on=1)
    done.refused("format.statistics", "check DIR --write")
    project.run(data, "--workers", 0, "--write", script="ddpkit check", on=1).ok()
    given = json.loads((data / "data.json").read_text())
    expected = [values.mean(0), values.std(0)]
    np.testing.assert_allclose([given["mean"], given["std"]], expected, rtol=1e-3)
    project.train(data, out, net, draws=True).ok()
    assert (out / "examples.png").is_file()
    project.train(data, out, net, "--epochs", 2).ok()
    losses = [float(row["val_loss"]) for row in rows(out)]
    assert len(losses) == 2
    only = project.train(data, out, net, "--eval-only", "--json").ok().out
    best = json.loads(only.strip().splitlines()[-1])["val_loss"]
    assert any(loss == pytest.approx(best) for loss in losses)
    words = [data / "val" / ("images" if is_dense else "")]
    words += ["--checkpoint", out / "best.pt", "--output", tmp_path / "predicted"]
    project.run(words, script="predict.py", on=1).ok()
    if is_dense:
        return
    # The exported network takes float32 of as many channels, and normalises it.
    words = ["--checkpoint", out / "best.pt", "--output", tmp_path]
    project.run(words, script="ddpkit export", on=1).ok()
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    held = session.get_modelmeta().custom_metadata_map
    assert held["channels"] == "5"
    for name in "mean", "std", "value_range":
        assert json.loads(held[name]) == given[name]
    images = np.random.default_rng(0).random((4, 5, 64, 64), np.float32)
    assert session.run(["logits"], {"images": images})[0].shape == (4, 2)
