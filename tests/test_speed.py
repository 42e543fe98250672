"""What makes a run fast leaves what it learns as it is: decoding, prepared data, the step."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import SAME_FOR_BOTH, SCRIPTS, SMALL, TASKS, Done, Project, flags, rows, run


def photo(height: int, width: int) -> Image.Image:
    """Waves of another length in each direction and colour, so that a shift would show."""
    row, column = np.mgrid[:height, :width]
    waves = [np.sin(row / 19), np.cos(column / 17), np.sin((row + 2 * column) / 31)]
    pixels = np.stack([128 + 100 * wave for wave in waves], axis=-1)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = 20
    return Image.fromarray(pixels.astype(np.uint8))


def draw_kinds(folder: Path) -> dict[str, Path]:
    image, kinds = photo(375, 501), {}

    def save(name: str, image: Image.Image, **options: object) -> None:
        kinds[name] = folder / name
        image.save(kinds[name], **options)

    save("usual.jpg", image, quality=90)
    save("full.jpg", image, subsampling=0)
    save("half.jpg", image, subsampling=1)
    save("grey.jpg", image.convert("L"))
    save("progressive.jpg", image, progressive=True)
    save("lossless.png", image)
    save("cmyk.jpg", image.convert("CMYK"))
    exif = Image.Exif()
    for name, orientation in ("upright.jpg", 1), ("turned.jpg", 6):
        exif[0x0112] = orientation
        save(name, image, exif=exif)
    usual = kinds["usual.jpg"].read_bytes()
    for name, content in (
        ("tail.jpg", usual + b"\0 more"),
        ("extra.jpg", usual[:-2] + b"\0\0\0" + usual[-2:]),
    ):
        kinds[name] = folder / name
        kinds[name].write_bytes(content)
    return kinds


@SAME_FOR_BOTH
def test_decoders_agree(project: Project, tmp_path: Path) -> None:
    """Size, place and pixels of what is read, whatever decodes; at full size bit by bit."""
    kinds = draw_kinds(tmp_path)
    found = project.call("decoding.compared", *kinds.values())
    for name, (report, decoded) in zip(kinds, found, strict=True):
        # Of the last one simplejpeg refuses the end.
        is_left_to_pillow = name in ("lossless.png", "cmyk.jpg", "turned.jpg", "extra.jpg")
        assert decoded == (0 if is_left_to_pillow else len(report)), name
        for number, (off, off_if_moved) in enumerate(report):
            is_shrunk = number in (3, 4, 5, 7)
            assert off < (8 if is_shrunk else 0.1), (name, number)
            assert off < 0.7 * off_if_moved, (name, number)


@SAME_FOR_BOTH
def test_broken_images_are_found(project: Project, tmp_path: Path) -> None:
    """A JPEG that was cut off is named, even if the part that is asked for is there."""
    whole = tmp_path / "whole.jpg"
    photo(375, 501).save(whole)
    data = whole.read_bytes()
    broken = []
    for size in (0, 100, len(data) // 2, len(data) - 1):
        broken.append(tmp_path / f"{size}.jpg")
        broken[-1].write_bytes(data[:size])
    found = project.call("decoding.parts", whole, *broken)
    assert set(found) == {"simplejpeg", "Pillow"}
    for path, line in (*found["simplejpeg"], *found["Pillow"]):
        if path == str(whole):
            assert line == "read"
        else:
            assert re.fullmatch(rf"{path}: cannot be read \(.*\); replace or remove it", line)


def prepare(project: Project, *words: object) -> Done:
    return project.fork(*words, ranks=1, script="ddpkit prepare")


def content(store: Path) -> list[bytes]:
    return [(store / name).read_bytes() for name in ("pixels.bin", "rows.bin", "index.json")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "last.pt", weights_only=True)["model"]


def test_prepared_data(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Whole or not there; trains to the same bits as its source."""
    store, whole = tmp_path / "store", tmp_path / "whole"
    said = project.call("preparing.interrupted", own_data, store, "--short-side", 0)
    lines = [line for line in said if not line.startswith("classes, ")]
    assert re.fullmatch(rf"{store}: \d+ samples; train with --data {store}", lines[0])
    assert lines[1:] == [f"{store}: prepared already, and {own_data} has not changed"]
    assert {p.name for p in store.iterdir()} == {"index.json", "pixels.bin", "rows.bin"}
    assert not [*tmp_path.glob("store.partial*")]  # of the one that was killed
    prepare(project, "--data", own_data, "--output", whole, "--short-side", 0).ok()
    assert content(store) == content(whole)

    runs = {own_data: tmp_path / "from files", store: tmp_path / "from store"}
    for source, out in runs.items():
        project.fork(*flags(source, out), draws=False).ok()
    one, other = map(weights, runs.values())
    assert all(torch.equal(one[name], other[name]) for name in one)

    project.call("preparing.written_to", store)

    said = project.alone(*flags(store, out, "--eval-only"), draws=False).ok().out
    results = json.loads(said.splitlines()[-1])
    assert results["val_loss"] == pytest.approx(float(rows(out)[-1]["val_loss"]))


def test_prepared_data_that_does_not_fit(
    project: Project, projects: Callable[[str], Project], own_data: Path, tmp_path: Path
) -> None:
    """The source has changed, or is not there; the copy is not whole, or of the other task."""
    (other_project,) = (projects(task) for task in TASKS if task != project.task)
    store, out = tmp_path / "store", tmp_path / "out"
    words = ("--data", own_data, "--output", store, "--short-side", 32)
    prepare(project, *words).ok()
    picture = next(path for path in sorted((own_data / "train").rglob("*.jpg")))
    first = content(store)

    shutil.copy(picture, picture.with_name("more.jpg"))
    if project.task == "segmentation":
        mask = next((own_data / "train" / "masks").iterdir())
        shutil.copy(mask, mask.with_name("more.png"))
    project.alone(*flags(store, out)).refused("changed since", "prepare it anew")
    prepare(project, *words).refused("store: there already", "remove it")
    assert content(store) == first
    shutil.rmtree(store)
    prepare(project, *words).ok()
    assert content(store) != first
    project.alone(*flags(store, out), draws=False).ok()

    with open(store / "pixels.bin", "r+b") as file:
        file.truncate(1000)
    project.alone(*flags(store, out)).refused("store: incomplete", "prepare it anew")
    shutil.rmtree(store)
    prepare(project, *words).ok()
    project.alone(*flags(store, out), draws=False).ok()

    os.utime(picture)
    project.alone(*flags(store, out)).refused(f"{own_data} has changed since {store} was prepared")
    own_data.rename(tmp_path / "elsewhere")
    project.alone(*flags(store, out), draws=False).ok()

    other = other_project.draw(tmp_path / "other", 12, 12)
    prepare(other_project, "--data", other, "--output", tmp_path / "other store").ok()
    done = project.alone(*SMALL, "--data", tmp_path / "other store", "--output-dir", tmp_path)
    done.refused("other store", "another task")

    if project.task == "segmentation":  # made of masks that are refused where they lie as files
        pixels = np.memmap(store / "pixels.bin", np.uint8, "r+")
        for offset, height, width, channels in np.fromfile(store / "rows.bin", int).reshape(-1, 4):
            if not channels:
                mask = pixels[offset : offset + height * width]
                mask[mask == 1] = 255
        pixels.flush()
        project.alone(*flags(store, out)).refused(
            "store: the training masks hold 0, 255 (255 is void)"
        )

    with open(store / "rows.bin", "r+b") as file:
        file.truncate(1000)
    project.alone(*flags(store, out)).refused("store: incomplete")

    words = ("--data", tmp_path / "elsewhere", "--output")
    prepare(project, *words, tmp_path / "elsewhere" / "train" / "x").refused("name a folder els")
    before = content(tmp_path / "other store")
    prepare(project, *words, tmp_path / "other store").refused("there already, and not made of")
    assert content(tmp_path / "other store") == before
    prepare(project, *words, out).refused("there already", "another folder")
    assert (out / "last.pt").exists()
    picture = tmp_path / "elsewhere" / picture.relative_to(own_data)
    picture.write_bytes(picture.read_bytes()[:-200])
    prepare(project, *words, tmp_path / "broken").refused(str(picture), "cannot be read")
    assert not (tmp_path / "broken").exists()


@SAME_FOR_BOTH
def test_workers_that_are_not_forked(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Under forkserver, the default of Python 3.14: the same store, and the same samples."""
    store, other = tmp_path / "store", tmp_path / "other"
    command = [sys.executable, SCRIPTS / "forkserver.py", own_data, store]
    run(command, cwd=project.folder, PYTHONPATH=str(project.folder)).ok()
    prepare(project, "--data", own_data, "--output", other, "--short-side", 0).ok()
    assert content(store) == content(other)


@SAME_FOR_BOTH
def test_prepared_data_of_a_list(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Labels that come from a file are looked after."""
    store, out = tmp_path / "store", tmp_path / "out"
    for part in ("train", "val"):
        names = [path.relative_to(own_data) for path in sorted((own_data / part).rglob("*.jpg"))]
        lines = ["file,label", *(f"{name},{name.parent.name} small" for name in names)]
        (own_data / f"{part}.csv").write_text("\n".join(lines))

    def prepare_again() -> list:
        shutil.rmtree(store, ignore_errors=True)
        prepare(project, "--data", own_data, "--output", store, "--short-side", 32).ok()
        index = json.loads((store / "index.json").read_text())
        samples = dict(sample for sample, _ in index["train"])
        return samples[str(own_data / "train/bricks/0000.jpg")]

    label = prepare_again()
    project.fork(*flags(store, out), draws=False).ok()
    text = (own_data / "train.csv").read_text()
    (own_data / "train.csv").write_text(text.replace("bricks small", "dots small", 1))
    done = project.fork(*flags(store, out))
    done.refused(f"{own_data} has changed since {store} was prepared")
    assert (label, prepare_again()) == (0, 2)
    own_data.rename(tmp_path / "elsewhere")
    project.fork(*flags(store, out), draws=False).ok()


@SAME_FOR_BOTH
def test_nothing_waits_in_a_step(project: Project, data: Path, tmp_path: Path) -> None:
    """No collective but the gradients', once a step; no number is read off the device."""
    project.call("steps.profiles", data, tmp_path)
    sums = set()
    for accumulate in (1, 2):
        for rank in (0, 1):
            counts = json.loads((tmp_path / str(accumulate) / f"rank{rank}.json").read_text())
            assert counts["DistributedDataParallel.forward"] == 3 * accumulate
            collectives = {name: n for name, n in counts.items() if name.startswith("c10d::")}
            assert collectives.keys() == {"c10d::allreduce_"}
            sums.add(collectives["c10d::allreduce_"])
            assert not {"aten::_local_scalar_dense", "aten::item", "aten::nonzero"} & counts.keys()
    (count,) = sums
    # The buckets of 11 million gradients; the number of samples is known to be that of targets.
    assert count in (3 * 2, 3 * 3)


@SAME_FOR_BOTH
def test_the_projects_own_test_of_a_step(project: Project, data: Path) -> None:
    """It finds what would make the device wait, and names the line."""
    plants = ["loss_sum.item()", "outputs.cpu()", "loss_sum > 9 and 0", "outputs[targets > 0]"]
    plants += ["print(loss_sum)", "f'{loss_sum:.3f}'", "str({'loss': loss_sum})"]
    *found, clean = project.call("steps.readings", data, [*plants, "print(i, loss_sum.shape)"])
    assert clean == ""
    for plant, line in zip(plants, found, strict=True):
        assert line.startswith("main.py:"), plant
        assert "run.loss(" in line


def test_what_a_step_costs_the_host(project: Project, tmp_path: Path) -> None:
    """Operations of torch, and calls of functions, more than in a bare loop with the same network.

    On a GPU each operation is a kernel to launch, for which the device may have to wait.
    """
    operations, calls = project.call("steps.more_than_bare", tmp_path / "plain")
    is_dense = project.task == "segmentation"  # whose labelled pixels have to be counted
    assert 0 <= operations <= (20 if is_dense else 6)
    assert 0 < calls <= (230 if is_dense else 160)  # to search the network takes 500
    if not is_dense:  # counts that are not known take 10 operations and a collective
        words = "--class-weights", "1,2,3"
        weighted, _ = project.call("steps.more_than_bare", tmp_path / "weighted", *words)
        assert operations < weighted <= 15


@SAME_FOR_BOTH
def test_accumulation_equals_a_large_batch(project: Project, data: Path, tmp_path: Path) -> None:
    """And so do ranks; gradients are clipped once they are whole."""
    project.call("steps.portions", data, tmp_path)
    start = weights(tmp_path / "start")

    def way(name: str, origin: dict[str, torch.Tensor] = start) -> float:
        now = weights(tmp_path / name)
        return sum((now[key] - origin[key]).square().sum().item() for key in origin) ** 0.5

    one = weights(tmp_path / "one")
    assert way("one") > 1e-3
    for name in "four", "ranks":
        assert way(name, one) < 1e-4 * way("one")
    assert way("twice", one) > 0.1 * way("one")
    for name in "clipped", "bf16":
        assert 1e-6 < way(name) < 6.01e-6


@SAME_FOR_BOTH
def test_half_precision(project: Project, data: Path, tmp_path: Path) -> None:
    """fp16 skips steps until its scale fits, resumes with that scale, and does not go astray."""
    words = ["--arch", "squeezenet1_1", "--image-size", 32, "--batch-size", 4, "--workers", 0]
    words += ["--optimizer", "sgd", "--lr", 0.01, "--epochs", 1, "--amp", "fp16"]
    found = project.call("resume.in_half_precision", data, tmp_path, *words)
    assert found["whole"] == found["stop"]
    assert len({*found.values()}) == 3
    state = torch.load(tmp_path / "whole" / "last.pt", weights_only=True)
    assert state["scaler"]["scale"] < 2**16
    assert float(rows(tmp_path / "whole")[0]["train_loss"]) < 2


def test_workers_do_not_copy_the_list_of_samples(project: Project) -> None:
    of_list, of_packed = project.call("memory.of_samples")
    assert of_list > 20_000  # what it is that the test would see
    assert of_packed < 2_000


@SAME_FOR_BOTH
def test_compiled(project: Project, data: Path, tmp_path: Path) -> None:
    """Its checkpoints fit an uncompiled network."""
    words, options = flags(data, tmp_path), {"script": SCRIPTS / "tiny.py", "draws": False}
    done = project.alone(*words, "--compile", **options).ok()
    assert "compiled 1 graph(s)" in done.out
    done = project.fork(*words, "--epochs", 2, **options).ok()
    assert "1 of 2 epochs done" in done.out
