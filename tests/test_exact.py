"""The same pictures and the same numbers on any number of ranks and of loader workers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Project, rows
from PIL import Image
from test_runs import SAME_FOR_BOTH, flags

# Prints, for each epoch, what each global batch of 8 holds: a checksum for each sample.
BATCHES = """
import json, random, sys, zlib
from pathlib import Path
import numpy as np, torch
import dataset
from engine.data import loading, seeding
from engine.ranks import distributed

distributed.setup()
data, _, classes = dataset.build_dataset(Path(sys.argv[1]), 32)

def sums(ranks, batch_size, accumulate, workers):
    options = loading.Options(workers, prefetch=2, pin_memory=False, seed=3)

    class Noisy(torch.utils.data.Dataset):  # what an owner may write
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            noise = [random.random(), np.random.rand(), torch.rand(1).item()]
            return (*data[index], torch.tensor(noise, dtype=torch.float64))

    distributed.world_size = lambda: ranks
    found = [{}, {}]
    for rank in range(ranks):
        distributed.rank = lambda: rank
        loader = loading.build_train_loader(
            Noisy(), len(classes), batch_size, accumulate, options)
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for i, batch in enumerate(loader):
                step = found[epoch].setdefault(i // accumulate, [])
                step += [zlib.crc32(b"".join(part.numpy().tobytes() for part in sample))
                         for sample in zip(*batch)]
    return [[sorted(step) for step in epoch.values()] for epoch in found]

shapes = [(1, 8, 1, 0), (2, 4, 1, 1), (4, 1, 2, 0), (1, 2, 4, 3)]
out = [sums(*shape) for shape in shapes]
seeding.seed = lambda *key: None
print(json.dumps([out, sums(1, 8, 1, 0)]))
"""


def test_same_pictures_whatever_the_machine(project: Project, data: Path) -> None:
    """On 1, 2 and 4 ranks, with 0 to 3 workers; not without the seeds for each sample."""
    (first, *others), unkeyed = json.loads(project.python(BATCHES, data))
    for epoch in first:
        assert [len(step) for step in epoch] == [8] * 6  # of 53 pictures
    assert first[0] != first[1]
    assert all(other == first for other in others)
    assert unkeyed != first


@SAME_FOR_BOTH
def test_workers_do_not_change_what_is_learnt(project: Project, data: Path, tmp_path: Path) -> None:
    """With dropout, whose random numbers loader workers must not share or shift."""
    weights = []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        more = ["--arch", "squeezenet1_1", "--workers", workers]
        project.alone(*flags(data, out, *more)).ok()
        weights.append(torch.load(out / "last.pt", weights_only=True)["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@SAME_FOR_BOTH
def test_seeds_of_different_lengths_differ(project: Project) -> None:
    code = (
        "from engine.data.seeding import number as n; print(n(1, 2), n(1, 2), n(1, 2, 0), n(2, 1))"
    )
    same, again, longer, turned = project.python(code).split()
    assert same == again
    assert len({same, longer, turned}) == 3


# Kills all ranks after a step, starts again, and compares with the run that went on.
RESUME = """
from forked import *
data, folder, ranks, *words = sys.argv[1:]
ranks = int(ranks)

def killed_after(step, more=lambda: None):
    def patch():
        from engine.run.progress import Run
        more()
        end_step = Run.end_step
        def patched(self):
            end_step(self)
            if self.step == step:
                os.kill(os.getpid(), signal.SIGKILL)
        Run.end_step = patched
    return patch

def result(name, *more, stop=None, spoil=lambda: None):
    flags = ["--data", data, "--output-dir", f"{folder}/{name}", *words, *more]
    said = f"{folder}/{name}.said"
    if stop:
        assert run(ranks, *flags, patch=killed_after(stop, spoil), output=said) == [-9] * ranks
    assert run(ranks, *flags, patch=spoil, output=said) == [0] * ranks
    return digest(f"{folder}/{name}")
"""


@SAME_FOR_BOTH
def test_resume_at_any_step(project: Project, data: Path, tmp_path: Path) -> None:
    """Before the first checkpoint, in a save's step, before evaluation, in the next epoch."""
    code = """
def unkeyed():
    from engine.data import seeding
    numbers = iter(range(10**6))
    key = seeding.number
    seeding.number = lambda *_: key(next(numbers))
print(result("whole"), *(result(f"every{n}", "--save-every", n) for n in (1, 4)))
print(*(result(f"stop{n}", "--save-every", 3, stop=n) for n in (1, 3, 5, 6, 9)))
every3 = ("--save-every", 3)
print(result("unkeyed", spoil=unkeyed), result("unkeyed9", *every3, stop=9, spoil=unkeyed))
"""
    words = ["--arch", "mobilenet_v3_small", "--epochs", 2, "--workers", 1, "--image-size", 32]
    words += ["--batch-size", 4, "--deterministic"]
    out = project.python(RESUME + code, data, tmp_path, 2, *words)
    intervals, stops, unkeyed = (line.split() for line in out.splitlines())
    assert len({*intervals, *stops}) == 1
    assert len(set(unkeyed)) == 2
    kept = rows(tmp_path / "stop9")
    for row, other in zip(kept, rows(tmp_path / "whole"), strict=True):
        different = {name for name in row if row[name] != other[name]}
        assert different <= {"img_per_s", "train_seconds", "data_wait"}


@SAME_FOR_BOTH
def test_resume_of_three_ranks(project: Project, data: Path, tmp_path: Path) -> None:
    """DDP sums in another order in a process's first step; not, if that was a throw-away pass."""
    code = """
def unsettled():
    from engine.ranks import replicas
    replicas._settle_buckets = lambda *_: None
each = ("--save-every", 1)
print(result("whole"), result("stop", *each, stop=2))
print(result("whole2", spoil=unsettled), result("stop2", *each, stop=2, spoil=unsettled))
"""
    words = ["--image-size", 32, "--batch-size", 4, "--workers", 0]
    out = project.python(RESUME + code, data, tmp_path, 3, *words, "--epochs", 1)
    (whole, stop), (unsettled_whole, unsettled_stop) = (line.split() for line in out.splitlines())
    assert whole == stop
    assert unsettled_whole != unsettled_stop


@SAME_FOR_BOTH
def test_resume_on_another_number_of_ranks(project: Project, data: Path, tmp_path: Path) -> None:
    """The same pictures in the same order; what cannot be the same is said."""
    words = ["--image-size", 32, "--workers", 0, "--epochs", 2]
    code = """
flags = ["--data", data, "--output-dir", f"{folder}/run", *words, "--save-every", 2]
assert run(2, *flags, "--batch-size", 4, patch=killed_after(8)) == [-9, -9]
passes = []
def whole_steps():
    from engine.ranks import replicas
    from engine.run.progress import Run
    wrap, end_step = replicas.wrap, Run.end_step
    def counting(model, device):
        ddp_model = wrap(model, device)
        ddp_model.register_forward_pre_hook(lambda *_: passes.append(1))
        return ddp_model
    def checked(self):
        assert len(passes) % 2 == 0, len(passes)
        end_step(self)
    replicas.wrap, Run.end_step = counting, checked
accumulating = ["--batch-size", 3, "--accumulate", 2]
assert run(1, *flags, *accumulating, output=f"{folder}/said", patch=whole_steps) == [0]
"""
    project.python(RESUME + code, data, tmp_path, 1, *words)
    said = (tmp_path / "said.out").read_text()
    assert "1 of 2 epochs done" in said
    assert " and 2 steps of the next; 2 rank(s) then, 1 now: the same pictures" in said
    assert "; global batch (--batch-size x ranks x --accumulate) 8 then, 6 now" in said
    # 37 pictures are left of that epoch: six steps of 6.
    assert [row["step"] for row in rows(tmp_path / "run")] == ["6", str(8 + 6)]


# Prints loss and metrics of an untrained network on the first 1, 5 and 53 pictures.
METRICS = """
import argparse, json, sys
from pathlib import Path
import torch
from torch.utils.data import Subset
import dataset, main, model
from engine.data import loading, seeding
from engine.ranks import distributed

args = main.parse_args(["--data", sys.argv[1], "--batch-size", "2", "--workers", "0"])
args.image_size = 32
options = loading.Options(0, 2, False, args.seed)
distributed.setup()
_, val, classes = dataset.build_dataset(args.data, 32)
seeding.seed(1)
net = model.build_model(args, classes)
for size in (1, 5, 53):
    part = Subset(val, list(range(0, 53, 53 // size))[:size])
    found = main.evaluate(
        net, model.build_criterion(args), model.build_metrics(classes),
        loading.build_val_loader(part, len(classes), 2, options), torch.device("cpu"), "off")
    distributed.say(json.dumps(found))
distributed.teardown()
"""


def test_metrics_on_any_number_of_ranks(project: Project, tmp_path: Path) -> None:
    """Fewer pictures than ranks, void, and a class that never comes."""
    data = project.draw(tmp_path / "set", 6, 53)
    if project.task == "segmentation":
        (data / "classes.txt").write_text("background\ncrack\nnever\n")
        for n, path in enumerate(sorted((data / "val" / "masks").iterdir())):
            mask = np.array(Image.open(path))
            mask[: 5 * (n % 7)] = 255
            Image.fromarray(mask).save(path)
    script = tmp_path / "metrics.py"
    script.write_text(METRICS)
    found = []
    for ranks in (1, 2, 3, 5):
        out = project.fork(data, script=str(script), ranks=ranks).ok().out
        found.append([json.loads(line) for line in out.splitlines()])
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            loss, its = mine["val_loss"], theirs["val_loss"]
            assert its == pytest.approx(loss, rel=1e-14)
            assert {**theirs, "val_loss": 0} == pytest.approx(
                {**mine, "val_loss": 0}, rel=0, abs=0, nan_ok=True
            )
    assert len({str(each) for each in found[0]}) == 3
    if project.task == "segmentation":
        # The class that never comes is predicted here and there, or nowhere: 0 or nan.
        assert all(np.nan_to_num(each["iou_never"]) == 0 for each in found[0])


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_deterministic_metrics_take_no_more_memory(project: Project) -> None:
    """For what is told to be deterministic torchmetrics takes pixels x classes squared: 0.9 GB."""
    code = """
import main, model, torch
from engine.data import seeding
from engine.ranks import distributed

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

distributed.setup()
seeding.be_deterministic()
images, targets = (torch.zeros(2, *shape, 256, 256, dtype=torch.uint8) for shape in ((3,), ()))
metrics = model.build_metrics([str(number) for number in range(21)])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = peak()
net, loss = torch.nn.Conv2d(3, 21, 1), model.build_criterion(None)
main.evaluate(net, loss, metrics, [[(images, targets)]], torch.device("cpu"), "off")
assert torch.are_deterministic_algorithms_enabled()
assert torch.is_deterministic_algorithms_warn_only_enabled()
print(peak() - before)
"""
    assert int(project.python(code)) < 300_000  # kilobytes
