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
from conftest import SMALL, TASKS, Done, Project, rows, run
from PIL import Image
from test_exact import RESUME
from test_runs import SAME_FOR_BOTH, flags

# Reads parts of images with Pillow and with simplejpeg, and compares with a decode of the whole.
DECODE = """
import json, sys, torch
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms.v2 import functional as F
from engine.data import images

BOXES = (  # with the size of the result: whole; a part as it is; shrunk by less and more than 2
    (None, None), ((13, 7, 101, 93), None), ((33, 51, 177, 123), (100, 90)),
    (None, (64, 80)), ((8, 16, 256, 320), (64, 80)), ((33, 51, 313, 347), (60, 60)),
    ((-20, -10, 400, 560), None), ((-20, -10, 400, 560), (80, 112)),
)
calls = []

class Counted:
    def decode_jpeg(*args, **options):
        calls.append(simplejpeg.decode_jpeg(*args, **options))
        return calls[-1]

def read(path, library):
    images.simplejpeg = library
    image = images.open_image(path)
    return image, [image.read(*box) for box in BOXES]

def compare(path):
    whole = F.pil_to_tensor(images.read_image(path))
    image, plain = read(path, None)
    _, best = read(path, Counted)
    assert (image.height, image.width) == whole.shape[1:]
    report = []
    for (box, size), one, other in zip(BOXES, plain, best):
        expected = F.crop(whole, *(box or (0, 0, *whole.shape[1:])))
        expected = F.resize(expected, list(size)) if size else expected
        assert one.dtype == other.dtype == torch.uint8 and one.shape == expected.shape
        assert torch.equal(one, other)
        inner = expected[:, 2:-2, 2:-2].float()
        def off(by_rows, by_columns):
            moved = one.roll((by_rows, by_columns), (1, 2))[:, 2:-2, 2:-2]
            return (moved - inner).abs().mean().item()
        report.append([off(0, 0), min(off(-1, 0), off(1, 0), off(0, -1), off(0, 1))])
    if calls:
        assert torch.equal(best[0], decode_jpeg(read_file(path), ImageReadMode.RGB))
    return report

simplejpeg = images.simplejpeg
print(json.dumps([[compare(path), len(calls)] for path in sys.argv[1:] if not calls.clear()]))
"""


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
    found = json.loads(project.python(DECODE, *kinds.values()))
    for name, (report, decoded) in zip(kinds, found, strict=True):
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
    code = """
import sys
from engine.data import images
from engine.errors import UserError
assert images.decoder() == "simplejpeg"
for images.simplejpeg in images.simplejpeg, None:
    for path in sys.argv[1:]:
        for size in None, (20, 20):
            try:
                images.open_image(path).read((0, 0, 50, 50), size)
                print("read")
            except UserError as error:
                print(error)
assert images.decoder() == "Pillow"
"""
    broken = []
    for size in (0, 100, len(data) // 2, len(data) - 1):
        broken.append(tmp_path / f"{size}.jpg")
        broken[-1].write_bytes(data[:size])
    lines = project.python(code, whole, *broken).splitlines()
    assert len(lines) == 4 * (1 + len(broken))
    for number, line in enumerate(lines):
        path = [whole, *broken][number // 2 % (1 + len(broken))]
        if path == whole:
            assert line == "read"
        else:
            assert re.fullmatch(rf"{path}: cannot be read \(.*\); replace or remove it", line)


# Prepares a data set, killed after 20 samples, after 25 more in the middle of a write, then whole.
PREPARE = """
import os, signal, sys
source, store, *flags = sys.argv[1:]

def prepare(last=None):
    if not (pid := os.fork()):
        import prepare_data
        from engine.data import prepared
        from engine.ranks.distributed import one_line_errors
        tqdm = prepared.tqdm
        def samples(loader, **options):
            for number, sample in enumerate(tqdm(loader, **options)):
                if number == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield sample
        prepared.tqdm = samples
        with one_line_errors():
            prepare_data.main(["--data", source, "--output", store, "--workers", "1", *flags])
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

assert prepare(20) == -9
assert prepare(25) == -9
for name in "pixels.bin", "rows.bin":
    with open(f"{store}/{name}", "ab") as file:
        file.write(b"torn")
assert prepare() == 0
assert prepare() == 0
"""


def prepare(project: Project, *words: object) -> Done:
    return project.fork(*words, ranks=1, script="prepare_data.py")


def content(store: Path) -> list[bytes]:
    return [(store / name).read_bytes() for name in ("pixels.bin", "rows.bin", "index.json")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "last.pt", weights_only=True)["model"]


def test_prepared_data(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Killed and gone on with it is the same; trains to the same bits as its source."""
    store, whole = tmp_path / "store", tmp_path / "whole"
    out = project.python(PREPARE, own_data, store, "--short-side", 0)
    lines = out.splitlines()
    for line, done in zip(lines, ("", "; 20 are there already", "; 45 are there al"), strict=False):
        assert re.match(rf"{store}: \d+ samples need about 0.00\d+ GB, .+ GB are free{done}", line)
    assert lines[3:] == [f"{store}: prepared already, and {own_data} has not changed"]
    assert {p.name for p in store.iterdir()} == {
        ".preparing",
        "index.json",
        "pixels.bin",
        "rows.bin",
    }
    prepare(project, "--data", own_data, "--output", whole, "--short-side", 0).ok()
    assert content(store) == content(whole)

    runs = {own_data: tmp_path / "from files", store: tmp_path / "from store"}
    for source, out in runs.items():
        project.fork(*flags(source, out)).ok()
    one, other = map(weights, runs.values())
    assert all(torch.equal(one[name], other[name]) for name in one)

    code = """
import sys, dataset
from pathlib import Path
train, _, _ = dataset.build_dataset(Path(sys.argv[1]), 32)
for picture in train.prepared[3]:
    before = picture.read().clone()
    picture.read().zero_()
    assert before.any() and (picture.read() == before).all()
"""
    project.python("from engine.ranks import distributed; distributed.setup()\n" + code, store)

    results = json.loads(project.alone(*flags(store, out, "--eval-only")).ok().out)
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
    project.alone(*flags(store, out)).refused("more.jpg", "changed since", "prepare_data.py")
    prepare(project, *words).ok()
    assert content(store) != first
    project.alone(*flags(store, out)).ok()

    with open(store / "pixels.bin", "r+b") as file:
        file.truncate(1000)
    project.alone(*flags(store, out)).refused("store: incomplete", "prepare_data.py")
    prepare(project, *words).ok()
    project.alone(*flags(store, out)).ok()

    os.utime(picture)
    project.alone(*flags(store, out)).refused(f"{picture}: file or label changed since")
    own_data.rename(tmp_path / "elsewhere")
    project.alone(*flags(store, out)).ok()

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
        project.alone(*flags(store, out)).refused("store: all 54 training masks hold class 0")

    with open(store / "rows.bin", "r+b") as file:
        file.truncate(1000)
    project.alone(*flags(store, out)).refused("store: incomplete", "prepare_data.py", "resume")

    words = ("--data", tmp_path / "elsewhere", "--output")
    prepare(project, *words, tmp_path / "elsewhere" / "train" / "x").refused("name a folder els")
    before = content(tmp_path / "other store")
    prepare(project, *words, tmp_path / "other store").refused(f"made of {other} with --short-side")
    assert content(tmp_path / "other store") == before
    prepare(project, *words, out).refused("not empty", "another folder")
    assert (out / "last.pt").exists()
    picture = tmp_path / "elsewhere" / picture.relative_to(own_data)
    whole = picture.read_bytes()
    picture.write_bytes(whole[:-200])
    prepare(project, *words, tmp_path / "broken").refused(str(picture), "cannot be read")
    picture.write_bytes(whole)
    code = """
import sys
from types import SimpleNamespace
import prepare_data
from engine.data import prepared
from engine.errors import UserError
prepared.shutil.disk_usage = lambda _: SimpleNamespace(free=10**5)
try:
    prepare_data.main(sys.argv[1:])
except UserError as error:
    print(error)
"""
    out = project.python(code, *words[:2], "--output", tmp_path / "large", "--workers", 0)
    assert "0.0001 GB are free; make room" in out


# Prepares a data set and reads it with loader workers that are not forked, as on Python 3.14.
FORKSERVER = """
import multiprocessing, sys
from pathlib import Path
from types import SimpleNamespace

def main(source, store):
    multiprocessing.set_start_method("forkserver")
    import torch
    import dataset, prepare_data
    from engine.data import loading
    prepare_data.main(["--data", source, "--output", store, "--short-side", "0", "--workers", "1"])
    loading.distributed.setup()
    loading.sys = SimpleNamespace(platform="darwin")
    train, _, classes = dataset.build_dataset(Path(store), 32)
    found = []
    for workers in 0, 1:
        options = loading.Options(workers, prefetch=2, pin_memory=False, seed=3)
        found.append(list(loading.build_train_loader(train, len(classes), 4, 1, options)))
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@SAME_FOR_BOTH
def test_workers_that_are_not_forked(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Under forkserver, the default of Python 3.14: the same store, and the same samples."""
    script = tmp_path / "forkserver.py"
    script.write_text(FORKSERVER)
    store, other = tmp_path / "store", tmp_path / "other"
    command = [sys.executable, script, own_data, store]
    run(command, cwd=project.folder, PYTHONPATH=str(project.folder)).ok()
    prepare(project, "--data", own_data, "--output", other, "--short-side", 0).ok()
    assert content(store) == content(other)


# A script of the project whose samples and labels come from DIR/train.csv and DIR/val.csv.
OWNER = """
import csv, runpy, sys
import dataset

def find_samples(root):
    parts = []
    for part in "train", "val":
        with open(root / f"{part}.csv", newline="") as file:
            parts.append([(str(root / name), labels) for name, labels in csv.reader(file)])
    return *parts, sorted({labels for part in parts for _, labels in part})

class Labelled(dataset.ImageDataset):
    def __getitem__(self, index):
        image, labels = super().__getitem__(index)
        return image, len(labels.split("|"))

dataset.find_samples, dataset.ImageDataset = find_samples, Labelled
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@SAME_FOR_BOTH
def test_prepared_data_of_a_list(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Labels that an owner reads from files of his own are stored as they are, and looked after."""
    script, store, out = tmp_path / "owner.py", tmp_path / "store", tmp_path / "out"
    script.write_text(OWNER)
    for part in ("train", "val"):
        names = [path.relative_to(own_data) for path in sorted((own_data / part).rglob("*.jpg"))]
        lines = [f"{name},{name.parent.name}|small" for name in names]
        (own_data / f"{part}.csv").write_text("\n".join(lines))

    def run(name: str, *words: object) -> Done:
        return project.fork(name, *words, ranks=2 if name == "main.py" else 1, script=str(script))

    def prepare() -> list[list]:
        run("prepare_data.py", "--data", own_data, "--output", store, "--short-side", 32).ok()
        return json.loads((store / "index.json").read_text())["train"]

    assert prepare()[0][0] == [str(own_data / "train/bricks/0000.jpg"), "bricks|small"]
    run("main.py", *flags(store, out)).ok()

    def edit(old: str, new: str) -> None:
        text = (own_data / "train.csv").read_text()
        (own_data / "train.csv").write_text(text.replace(old, new, 1))

    def refused(*words: str) -> None:
        run("main.py", *flags(store, out)).refused(*words, f"changed since {store} was prepared")

    edit("bricks|small", "dots|small")
    refused(f"{own_data / 'train/bricks/0000.jpg'}: file or label changed")
    assert prepare()[0][0] == [str(own_data / "train/bricks/0000.jpg"), "dots|small"]
    run("main.py", *flags(store, out)).ok()
    own_data.rename(tmp_path / "elsewhere")
    run("main.py", *flags(store, out)).ok()


@SAME_FOR_BOTH
def test_normalised_as_ever(project: Project) -> None:
    """uint8 through the workers, normalised afterwards: what ToTensor and Normalize make of it."""
    code = """
import torch
from torchvision.transforms.v2 import functional as F
from engine.data import loading
generator = torch.Generator().manual_seed(0)
images = torch.randint(0, 256, (4, 20, 30, 3), dtype=torch.uint8, generator=generator)
samples = [(image.movedim(-1, 0), number) for number, image in enumerate(images)]
(found, targets), = loading.to_device([loading.collate(samples)], torch.device("cpu"))
for (image, number), one, target in zip(samples, found, targets):
    expected = F.normalize(F.to_dtype(image, torch.float32, scale=True), loading.MEAN, loading.STD)
    assert (one - expected).abs().max() < 1e-6 and target == number
assert found.is_contiguous(memory_format=torch.channels_last)
try:
    loading.normalize(found)
except loading.UserError as error:
    print(error)
"""
    assert "images of torch.float32: leave them uint8" in project.python(code)


# Counts what the ranks do in three optimizer steps, with and without accumulation.
PROFILE = """
from forked import *
data, folder = sys.argv[1:]

def profiled():
    from engine.run.progress import Run
    end_step = Run.end_step
    profile = torch.profiler.profile()
    def patched(self):
        end_step(self)
        if self.step == 2:
            profile.start()
        elif self.step == 5:
            profile.stop()
            counts = {event.key: event.count for event in profile.key_averages()}
            path = Path(self.args.output_dir, f"rank{os.environ['RANK']}.json")
            path.write_text(json.dumps(counts))
    Run.end_step = patched

flags = ["--data", data, "--epochs", 1, "--image-size", 32, "--workers", 1, "--clip-grad-norm", 1]
flags += ["--optimizer", "sgd"]  # AdamW reads its count of steps, which lies on the CPU here
for accumulate, batch_size in (1, 4), (2, 2):
    more = "--accumulate", accumulate, "--batch-size", batch_size
    out = "--output-dir", f"{folder}/{accumulate}"
    assert run(2, *flags, *more, *out, patch=profiled) == [0, 0]
"""


@SAME_FOR_BOTH
def test_nothing_waits_in_a_step(project: Project, data: Path, tmp_path: Path) -> None:
    """No collective but the gradients', once a step; no number is read off the device."""
    project.python(PROFILE, data, tmp_path)
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
    assert count in (3 * 2, 3 * 3)  # the buckets of 11 million gradients


# Trains from the same weights in other portions; without dropout and BatchNorm.
PORTIONS = """
from forked import *
data, folder = sys.argv[1:]
def plain():
    torch.nn.Dropout.forward = lambda self, x: x
flags = ["--data", data, "--image-size", 64, "--epochs", 1, "--workers", 0, "--warmup-epochs", 0]
flags += ["--arch", "squeezenet1_1", "--optimizer", "sgd", "--weight-decay", 0]
for name, ranks, *more in (
    ("start", 1, 48, 1, "--lr", 0), ("one", 1, 48, 1), ("four", 1, 12, 4), ("ranks", 2, 12, 2),
    ("twice", 1, 48, 1, "--lr", 0.02), ("clipped", 2, 2, 2, "--clip-grad-norm", 1e-6, "--lr", 1),
    ("bf16", 2, 2, 2, "--clip-grad-norm", 1e-6, "--lr", 1, "--amp", "bf16"),
):
    batch_size, accumulate, *rest = more
    words = "--batch-size", batch_size, "--accumulate", accumulate, "--lr", 0.01, *rest
    out = "--output-dir", f"{folder}/{name}"
    assert run(ranks, *flags, *words, *out, "--momentum", 0, patch=plain) == [0] * ranks
"""


@SAME_FOR_BOTH
def test_accumulation_equals_a_large_batch(project: Project, data: Path, tmp_path: Path) -> None:
    """And so do ranks; gradients are clipped once they are whole."""
    project.python(PORTIONS, data, tmp_path)
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
    code = """
print(result("whole"), result("stop", "--save-every", 1, stop=4))
print(result("bf16", "--amp", "bf16"), result("off", "--amp", "off"))
"""
    words = ["--arch", "squeezenet1_1", "--image-size", 32, "--batch-size", 4, "--workers", 0]
    words += ["--optimizer", "sgd", "--lr", 0.01, "--epochs", 1, "--amp", "fp16"]
    out = project.python(RESUME + code, data, tmp_path, 2, *words)
    (whole, stop), (bf16, off) = (line.split() for line in out.splitlines())
    assert whole == stop
    assert len({whole, bf16, off}) == 3
    state = torch.load(tmp_path / "whole" / "last.pt", weights_only=True)
    assert state["scaler"]["scale"] < 2**16
    assert float(rows(tmp_path / "whole")[0]["train_loss"]) < 2


@SAME_FOR_BOTH
def test_resume_in_another_memory_format(project: Project) -> None:
    """A fused optimizer takes the order in memory for granted; moments of another are put right."""
    code = """
import torch
from engine.run import optimizers
weight, mean, square, grad = (torch.rand(4, 3, 3, 3) for _ in range(4))
ends = []
for fused in (True, False):
    w = torch.nn.Parameter(weight.contiguous(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([w], 0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    moments = {"step": torch.tensor(3.0), "exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
    parts = {"optimizer": optimizer, "scheduler": scheduler}
    state = {"optimizer": {"state": {0: moments}}, "scheduler": scheduler.state_dict()}
    state.update(path="last.pt", layout=optimizers.layout(parts))
    optimizers.restore(state, parts, 3, 9)
    w.grad = grad.contiguous(memory_format=torch.channels_last)
    optimizer.step()
    ends.append(w.detach())
assert torch.allclose(*ends, atol=1e-6)
"""
    project.python(code)


# What a forked worker's own memory grows by while it looks at each sample, in kilobytes.
GROWTH = """
import os, dataset

def grown(samples):
    receive, send = os.pipe()
    if not os.fork():
        before = private()
        for index in range(len(samples)):
            path, mask = samples[index]
        os.write(send, str(private() - before).encode())
        os._exit(0)
    os.wait()
    return int(os.read(receive, 99))

def private():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Private_Dirty"))

samples = [(f"train/{number:050}.jpg", f"{number:050}.png") for number in range(100_000)]
made = getattr(dataset, "ImageDataset", None) or dataset.SegmentationDataset
packed = made(samples, *[None] * (1 if hasattr(dataset, "ImageDataset") else 2)).samples
assert list(packed) == samples and packed[-1] == samples[-1]
print(grown(samples), grown(packed))
"""


def test_workers_do_not_copy_the_list_of_samples(project: Project) -> None:
    of_list, of_packed = map(int, project.python(GROWTH).split())
    assert of_list > 20_000  # what it is that the test would see
    assert of_packed < 2_000


@SAME_FOR_BOTH
def test_compiled(project: Project, data: Path, tmp_path: Path) -> None:
    """Its checkpoints fit an uncompiled network, and no compiler is one line."""
    more = ["--arch", "alexnet", "--compile"]
    done = project.fork(*flags(data, tmp_path, *more)).ok()
    assert "amp off, compiled" in done.out
    more = ["--arch", "alexnet", "--epochs", 2]
    assert "1 of 2 epochs done" in project.fork(*flags(data, tmp_path, *more)).ok().out


MACHINE = """
import json, os, sys
from pathlib import Path
from engine.run import machine
read_text = Path.read_text
found = []
for group, files in json.loads(sys.argv[1]):
    def fake(path, *args, **kwargs):
        if str(path) == "/proc/self/cgroup":
            return group
        try:
            return files[str(path)]
        except KeyError:
            raise FileNotFoundError from None
    Path.read_text = fake
    found.append(machine.cpus())
Path.read_text = read_text
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
pinned, shares = machine.cpus(), []
machine.cpus, machine.distributed.local_world_size = lambda: 8, lambda: 8
for os.environ["SLURM_CPUS_PER_TASK"] in ("0", "8", "1"):
    shares.append(machine.share())
print(json.dumps([found, pinned, shares]))
"""


@SAME_FOR_BOTH
def test_cpus_that_may_be_used(project: Project) -> None:
    """The quota of cgroups, of either version and at any level, and the affinity."""
    v1 = "5:cpu,cpuacct:/job\n1:memory:/job\n"
    cases = [
        ("0::/\n", {}),
        ("0::/\n", {"/sys/fs/cgroup/cpu.max": "max 100000\n"}),
        ("0::/\n", {"/sys/fs/cgroup/cpu.max": "100000 100000\n"}),
        ("0::/a/b\n", {"/sys/fs/cgroup/a/cpu.max": "50000 100000\n"}),
        ("0::/host/path\n", {"/sys/fs/cgroup/cpu.max": "20000 100000\n"}),
        (v1, {"/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n"}),
        (
            v1,
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "90000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
        ),
    ]
    all_of_them = len(os.sched_getaffinity(0))
    found, pinned, shares = json.loads(project.python(MACHINE, json.dumps(cases)))
    assert found == [all_of_them, all_of_them, 1, 1, 1, all_of_them, 1]
    assert pinned == 1
    assert shares == [1, 8, 1]  # srun may have dealt them out already


def test_input_bound(project: Project, data: Path, tmp_path: Path) -> None:
    """It is said when a run waits for its pictures, with what to turn; and only then."""
    code = """
from forked import *
data, folder, *words = sys.argv[1:]
def slow():
    import dataset
    read = dataset.open_image
    dataset.open_image = lambda path: (time.sleep(0.1), read(path))[1]
for name, patch, source in ("slow", slow, data), ("usual", nothing, data):
    flags = "--data", source, "--output-dir", f"{folder}/{name}"
    assert run(2, *words, *flags, output=f"{folder}/{name}", patch=patch) == [0, 0]
"""
    project.python(code, data, tmp_path, *SMALL, "--threads", 1, "--prefetch", 3)
    slow, usual = ((tmp_path / f"{name}.out").read_text() for name in ("slow", "usual"))
    share = float(rows(tmp_path / "slow")[0]["data_wait"])
    assert share > 0.3
    assert f"input-bound: {share:.0%} of " in slow
    assert "with 0 worker(s) on " in slow
    assert re.search(r"what helps: --workers \d+, prepare_data.py, more CPUs", slow)
    assert "input-bound" not in usual
    assert "per rank 0 loader worker(s), 3 batches ahead each, and 1 thread(s)" in usual
