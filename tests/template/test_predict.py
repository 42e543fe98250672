"""predict.py and export: what a trained network is used for."""

import csv
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from generated import Done, Project, both_tasks, run
from PIL import Image


def predict(project: Project, *words: object, checkpoint: Path, **options: object) -> Done:
    more = "--checkpoint", checkpoint
    return project.run(*words, *more, script="predict.py", on=1, **options)


def files(path: Path) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return [row["file"] for row in csv.DictReader(file)]


@both_tasks
def test_images_of_every_kind(project: Project, trained: Path, tmp_path: Path) -> None:
    """Those that cannot be read are left out and named at the end; names stay as they are."""
    images, out = tmp_path / "in", tmp_path / "\udcfe"
    images.mkdir()
    ramp = np.arange(40 * 96).reshape(40, 96)
    kinds = {
        "grey.png": Image.fromarray((ramp // 16).astype(np.uint8)),
        "deep.png": Image.fromarray((ramp * 17).astype(np.uint16)),
        "alpha.png": Image.new("RGBA", (96, 40), (200, 30, 30, 128)),
        "palette.png": Image.new("P", (96, 40), 3),
        "cmyk.jpg": Image.new("CMYK", (96, 40), (9, 99, 9, 9)),
        "\udcff.jpg": Image.new("RGB", (96, 40)),
    }
    for name, image in kinds.items():
        image.save(images / name)
    turned = Image.Exif()
    turned[0x0112] = 6  # by a camera held upright
    Image.new("RGB", (96, 40)).save(images / "turned.jpg", exif=turned)
    broken, empty = images / "broken.jpg", images / "empty.jpg"
    broken.write_bytes((images / "turned.jpg").read_bytes()[:500])
    empty.write_bytes(b"")
    done = predict(project, images, "--output", out, checkpoint=trained / "best.pt")
    assert done.status == 1
    assert done.out.startswith("7 of 9 images predicted: ")
    for path, line in zip((broken, empty), done.err.splitlines(), strict=True):
        assert line.startswith(f"error: {path}: ")
        assert "[images.reading]" in line
    if project.task == "classification":
        assert files(out / "predictions.csv") == sorted(
            f"{images / n}" for n in [*kinds, "turned.jpg"]
        )
        assert [path.name for path in out.iterdir()] == ["predictions.csv"]
        return
    sizes = {Path(name).stem: (96, 40) for name in kinds} | {"turned": (40, 96)}
    for part in "masks", "overlays":
        assert {p.stem: Image.open(p).size for p in (out / part).iterdir()} == sizes
    assert (out / "legend.png").exists()


@both_tasks
def test_what_cannot_be_predicted(project: Project, trained: Path, tmp_path: Path) -> None:
    out, bad = tmp_path / "out", tmp_path / "bad.jpg"

    def refused(path: Path, code: str, *words: str) -> None:
        done = predict(project, path, "--output", out, checkpoint=trained / "best.pt")
        done.failed(code, *words)

    refused(tmp_path / "none", "files.failure", "none")
    bad.write_bytes(b"\xff\xd8 no image")
    refused(bad, "", "bad.jpg")
    assert not list(out.rglob("*.*"))
    if project.task == "segmentation":  # whose masks would overwrite one another
        for name in "same.png", "same.jpg":
            Image.new("RGB", (64, 64)).save(tmp_path / name)
        bad.unlink()
        refused(tmp_path, "", "same.png", "same.jpg")


def test_killed(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """What was predicted so far is in a file; one folder comes after the other."""

    def dies_in_second_batch() -> None:
        from ddpkit.data import loading

        normalize, batches = loading.normalize, []

        def last(images: torch.Tensor, *more: object) -> torch.Tensor:
            batches.append(images)
            if len(batches) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return normalize(images, *more)

        loading.normalize = last

    paths = sorted(data.glob("train/*/*.jpg"))
    folders = [*{path.parent: None for path in paths}, "--output", tmp_path]
    done = predict(project, *folders, checkpoint=trained / "best.pt", patch=dies_in_second_batch)
    assert done.status == -9
    found = files(tmp_path / "predictions.csv.partial")
    assert found == [str(path) for path in paths[: len(found)]]
    assert len(found) in range(16, 53)


def test_names_that_are_not_text(project: Project, few: Path, tmp_path: Path) -> None:
    """Of an image and of the folders above it, on a terminal that takes ASCII alone."""
    data = shutil.copytree(few, tmp_path / "\udcfe \u00e9")
    shutil.rmtree(data / "val")
    first = min((data / "train" / "dots").iterdir())
    first.rename(first.with_name("\udcff.jpg"))
    store, ascii_only = tmp_path / "\udcfd", {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "ddpkit", "prepare", "--data", data, "--output", store]
    assert "26 samples" in run(command, project.folder, **ascii_only).ok().out
    project.train(store, tmp_path / "out", on=1).ok()


@both_tasks
def test_exported(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """On other numbers of images than were tried, and on other sizes, with all that it takes."""
    best, out = trained / "best.pt", tmp_path / "out"
    words = ["--checkpoint", best, "--output", out, "--data", data]
    done = project.run(*words, script="ddpkit export", on=1).ok()
    assert done.out.splitlines()[-1].startswith(f"{out}/model.onnx: logits differ by up to ")
    assert done.err == ""
    assert [path.name for path in out.iterdir()] == ["model.onnx"]
    is_free = project.task == "segmentation"

    def use() -> None:
        import model
        from ddpkit.data import loading
        from ddpkit.run import checkpoint
        from flags import parse_args

        opened = checkpoint.open_model(best, model.build_model, parse_args, torch.device("cpu"))
        net, classes, args, _ = opened
        session = onnxruntime.InferenceSession(f"{out}/model.onnx")
        for shape in [(5, 3, 96, 160), (1, 3, 64, 96)] if is_free else [(5, 3, 64, 64)]:
            images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
            with torch.inference_mode():
                expected = net(loading.normalize(torch.from_numpy(images))).numpy()
            (logits,) = session.run(["logits"], {"images": images})
            assert logits.dtype == np.float32
            assert abs(logits - expected).max() < 1e-3 * max(abs(expected).max(), 1)
        texts = session.get_modelmeta().custom_metadata_map
        held = {name: json.loads(text) for name, text in texts.items()}
        assert (held["classes"], held["arch"]) == (list(classes), args.arch)
        assert held["size"] == (None if is_free else [64, 64])
        assert held["multiple_of"] == (32 if is_free else None)
        assert held["mean"] == [0.485, 0.456, 0.406]
        assert held["std"] == [0.229, 0.224, 0.225]

    project.here(use).ok()


@pytest.mark.parametrize("how", ["a path that depends on the images", "another graph"])
def test_what_is_not_exported(project: Project, trained: Path, tmp_path: Path, how: str) -> None:
    def patch() -> None:
        from ddpkit.tools import export

        forward, write = export.Network.forward, export.write

        def depends(self: export.Network, images: torch.Tensor) -> torch.Tensor:
            return forward(self, images) + (1 if images.float().mean() > 300 else 0)

        def other(*args: object) -> object:
            export.Network.forward = lambda self, images: 1.1 * forward(self, images)
            return write(*args)

        if how == "another graph":
            export.write = other
        else:
            export.Network.forward = depends

    words = ["--checkpoint", trained / "best.pt", "--output", tmp_path / "out"]
    code, word = {
        "another graph": ("export.main", "model.onnx"),
        "a path that depends on the images": ("export.explaining", "exported"),
    }[how]
    done = project.run(*words, script="ddpkit export", on=1, patch=patch)
    done.refused(code, word)
    assert not list(tmp_path.rglob("model.*"))
