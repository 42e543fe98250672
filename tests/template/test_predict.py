"""predict.py and export: what a trained network is used for."""

import csv
import itertools
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from generated import Done, Project, both_tasks, die, refusal
from PIL import Image
from ranks import on_ranks
from torch import nn


def predict(
    project: Project, *words: object, checkpoint: Path, **options: object
) -> Done:
    more = ["--checkpoint", checkpoint]
    return project.run(words, more, script="predict.py", on=1, **options)


def files(path: Path) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return [row["file"] for row in csv.DictReader(file)]


@both_tasks
def test_images_of_every_kind(project: Project, trained: Path, tmp_path: Path) -> None:
    """Those that cannot be read are left out and named at the end; names stay as they are."""
    images = tmp_path / "in"
    out = tmp_path / "in" / "\udcfe"
    images.mkdir()
    if project.task == "segmentation":  # the command was given before, and interrupted
        for kind in "masks", "overlays":
            (out / kind).mkdir(parents=True)
            Image.new("L", (40, 40)).save(out / kind / "grey.png")
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
    broken = images / "broken.jpg"
    empty = images / "empty.jpg"
    broken.write_bytes((images / "turned.jpg").read_bytes()[:500])
    empty.write_bytes(b"")
    done = predict(project, images, "--output", out, checkpoint=trained / "best.pt")
    assert done.status == 1
    assert "7 of 9 images predicted: " in done.out
    for path, line in zip((broken, empty), done.err.splitlines(), strict=True):
        assert line.startswith(f"error: {path}: ")
        assert "[images.reading]" in line
    if project.task == "classification":
        names = [*kinds, "turned.jpg"]
        expected = sorted(str(images / name) for name in names)
        assert files(out / "predictions.csv") == expected
        assert [path.name for path in out.iterdir()] == ["predictions.csv"]
        return
    sizes = {Path(name).stem: (96, 40) for name in kinds} | {"turned": (40, 96)}
    for part in "masks", "overlays":
        assert {p.stem: Image.open(p).size for p in (out / part).iterdir()} == sizes
    assert (out / "legend.png").exists()


def test_killed(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """What was predicted so far is in a file; one folder comes after the other."""

    def dies_in_second_batch() -> None:
        from ddpkit.data import normalizing

        normalize = normalizing.normalize_images
        numbers = itertools.count(1)

        def last(*images: object) -> torch.Tensor:
            if next(numbers) == 2:
                die()
            return normalize(*images)

        normalizing.normalize_images = last

    paths = sorted(data.glob("train/*/*.jpg"))
    folders = list(dict.fromkeys(path.parent for path in paths))
    words = [folders, "--output", tmp_path]
    best = trained / "best.pt"
    done = predict(project, words, checkpoint=best, patch=dies_in_second_batch)
    assert done.status == -9
    found = files(tmp_path / "predictions.csv.partial")
    assert found == [str(path) for path in paths[: len(found)]]
    assert len(found) in range(16, 53)


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_interrupted(project: Project, trained: Path, tmp_path: Path) -> None:
    """What it has written until then is no image of the next call, also of another output."""
    images = tmp_path / "images"
    images.mkdir()
    for name in "abc":
        Image.new("RGB", (64, 64)).save(images / f"{name}.png")

    def dies_in_first_overlay() -> None:
        from ddpkit import files

        writing = files.writing

        def dying(path: Path, parents: bool = False) -> Any:
            if path.parent.name == "overlays":
                die()
            return writing(path, parents)

        files.writing = dying

    best = trained / "best.pt"
    words = [images, "--output", images / "first"]
    done = predict(project, words, checkpoint=best, patch=dies_in_first_overlay)
    assert done.status == -9
    assert (images / "first/masks/a.png").exists()
    done = predict(project, images, "--output", images / "next", checkpoint=best).ok()
    assert "3 of 3 images predicted" in done.out


def test_whole_images(project: Project, few: Path, tmp_path: Path) -> None:
    """--crop-scale 1 trains, evaluates and predicts on the same pixels, which the run keeps."""
    out = tmp_path / "out"
    # what it says depends on the pixels
    words = "--arch resnet18 --image-size 32 --epochs 2 --lr 0.003 --crop-scale 1"
    project.train(few, out, words.split(), on=1).ok()
    assert torch.load(out / "best.pt", weights_only=True)["args"]["crop"] is None

    def evaluate(*words: object) -> float:
        more = "--eval-only", "--json", words, "--arch", "resnet18", "--image-size", 32
        said = project.train(few, out, more, on=1).ok().out
        return float(json.loads(said.splitlines()[-1])["val_loss"])

    checkpoint = out / "best.pt"
    table = tmp_path / "predictions"
    predict(project, few / "val", "--output", table, checkpoint=checkpoint).ok()
    losses = []
    with open(table / "predictions.csv", newline="") as file:
        for row in csv.DictReader(file):
            label = Path(row["file"]).parent.name
            losses.append(-np.log(float(row[f"probability_{label}"])))
    whole = evaluate()
    # Six digits are written, whatever the size of a probability.
    assert np.mean(losses) == pytest.approx(whole, abs=1e-5)
    assert abs(evaluate("--crop-pct", 0.5) - whole) > 0.01


@pytest.mark.soak
@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_exported(project: Project, trained: Path, tmp_path: Path) -> None:
    """On other numbers of images than were tried, and on other sizes, with all that it takes."""
    best = trained / "best.pt"
    out = tmp_path / "out"
    words = ["--checkpoint", best, "--output", out]
    done = project.run(words, script="ddpkit export", on=1).ok()
    assert done.err == ""
    assert [path.name for path in out.iterdir()] == ["model.onnx"]

    def use() -> None:
        import ddpkit
        import model
        from ddpkit.data import normalizing
        from flags import parse_args

        opened = ddpkit.open_model(
            best, model.build_model, parse_args, torch.device("cpu")
        )
        net, classes, args, _ = opened
        session = onnxruntime.InferenceSession(f"{out}/model.onnx")
        for shape in (5, 3, 96, 160), (1, 3, 64, 96):
            images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
            with torch.inference_mode():
                expected = net(
                    normalizing.normalize_images(torch.from_numpy(images))
                ).numpy()
            (logits,) = session.run(["logits"], {"images": images})
            assert logits.dtype == np.float32
            assert abs(logits - expected).max() < 1e-3 * max(abs(expected).max(), 1)
        texts = session.get_modelmeta().custom_metadata_map
        held = {name: json.loads(text) for name, text in texts.items()}
        assert held["classes"] == list(classes)
        assert held["arch"] == args.arch
        assert held["size"] is None
        assert held["multiple_of"] == 32
        assert held["mean"] == [0.485, 0.456, 0.406]

    project.here(use).ok()


def test_an_export_that_differs(
    project: Project, trained: Path, tmp_path: Path
) -> None:
    def patch() -> None:
        from ddpkit.vision.tools import export

        def other(
            network: nn.Module,
            batch: object,
            stride: object,
            path: Path,
            _: object,
        ) -> Any:
            path.write_text("another graph")
            return lambda images: 1.1 * network(images).detach()

        export.write_onnx = other

    words = ["--checkpoint", trained / "best.pt", "--output", tmp_path / "out"]
    done = project.run(words, script="ddpkit export", on=1, patch=patch)
    done.refused("export.main", "model.onnx")
    assert not list(tmp_path.rglob("model.*"))


@both_tasks
def test_a_network_of_several_outputs(
    project: Project, trained: Path, tmp_path: Path
) -> None:
    """What it predicts is that of its logits; a checkpoint's --tta is that of predict.py."""

    def wrap() -> None:
        import model

        class Several(nn.Module):
            def __init__(self, net: nn.Module) -> None:
                super().__init__()
                self.net = net
                self.load_state_dict = net.load_state_dict

            def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
                logits = self.net(images)
                return {"aux": logits.sum(), "out": logits}

        infer = model.infer

        def with_flags(*given: Any) -> torch.Tensor:
            assert given[-1].tta
            return infer(*given)

        model.infer = with_flags
        build = model.build_model
        model.build_model = lambda *given: Several(build(*given))

    images = trained.parent / "set" / "val"
    best = trained / "best.pt"
    own = tmp_path / "own.pt"
    state = torch.load(best, weights_only=True)
    state["args"]["tta"] = True
    torch.save(state, own)
    found = {}
    for name, patch, path, more in (
        ("one", None, best, ["--tta"]),
        ("several", wrap, own, []),
    ):
        out = tmp_path / name
        words = [images, "--output", out, more]
        predict(project, words, checkpoint=path, patch=patch).ok()
        paths = (path for path in out.rglob("*") if path.is_file())
        found[name] = {path.relative_to(out): path.read_bytes() for path in paths}
    assert found["one"] == found["several"]


@both_tasks
@on_ranks(1)
def test_mirrored_images(project: Project) -> None:
    """--tta is the mean over an image and its mirror image; masks are mirrored back.

    Not if training saw no mirror images, --hflip 0: there they may mean something else.
    """
    import model

    torch.manual_seed(0)
    net = nn.Conv2d(3, 2, 3, padding=1)
    if project.task == "classification":
        net = nn.Sequential(net, nn.Flatten(), nn.Linear(2 * 32 * 32, 4))
    images = torch.randn(2, 3, 32, 32)

    def infer(images: torch.Tensor, tta: bool, hflip: float = 0.5) -> torch.Tensor:
        args = Namespace(tta=tta, hflip=hflip, tile=0)
        return model.infer(net, images, args).detach()

    other = infer(images.flip(-1), False)
    if project.task == "segmentation":
        other = other.flip(-1)
    mean = (infer(images, False) + other) / 2
    torch.testing.assert_close(infer(images, True), mean)
    assert torch.equal(infer(images, True, hflip=0), infer(images, False))


@both_tasks
@on_ranks(1)
def test_layers_of_a_network_of_your_own(project: Project) -> None:
    import model

    with refusal("model.layers", "--freeze-backbone", "`layers` in model.py"):
        model.layers(nn.Sequential(nn.Flatten(), nn.Conv1d(1, 1, 1)))
