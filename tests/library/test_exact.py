"""The same bits whenever a run is killed, and the same numbers on any number of ranks."""

import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from digest import digest
from generated import NET, Project, after_step, both_tasks, rows
from PIL import Image
from ranks import Patch, on_ranks
from torch.utils.data import DataLoader, Subset

import ddpkit
from ddpkit import files
from ddpkit.data import samples
from ddpkit.ranks import distributed, process, replicas
from ddpkit.run.loop import Run


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def patches(*each: Patch | None) -> Patch:
    return lambda: [patch() for patch in each if patch] and None


class Runs:
    """Runs of one set of flags, each in a folder of its own."""

    def __init__(self, project: Project, data: Path, folder: Path, on: int, *words: object) -> None:
        self.project, self.data, self.folder, self.on, self.words = project, data, folder, on, words

    def result(self, name: str, *stops: int, spoil: Patch | None = None) -> str:
        """The digest of a run that is killed after each of these steps and started again."""
        more = ("--save-every", 2) if stops else ()
        flags = self.data, self.folder / name, *self.words, *more
        for step in stops:
            killing = patches(spoil, after_step(step, kill))
            done = self.project.train(*flags, on=self.on, patch=killing)
            assert done.statuses == [-9] * self.on, done.err
        self.project.train(*flags, on=self.on, patch=spoil).ok()
        return digest(self.folder / name)


def test_resume_at_any_step(project: Project, few: Path, tmp_path: Path) -> None:
    """Before the first checkpoint, in a save's step, before evaluation, in the next epoch."""

    def unkeyed() -> None:
        numbers, key = iter(range(10**6)), samples.hash_key
        samples.hash_key = lambda *_: key(next(numbers))

    runs = Runs(project, few, tmp_path, 2, *NET, "--epochs", 2, "--deterministic")
    assert runs.result("whole") == runs.result("stopped", 1, 2, 3, 5)
    assert runs.result("unkeyed", spoil=unkeyed) != runs.result("unkeyed5", 5, spoil=unkeyed)
    for row, other in zip(*(rows(tmp_path / name) for name in ("whole", "stopped")), strict=True):
        different = {name for name in row if row[name] != other[name]}
        assert different <= {"img_per_s", "train_seconds", "data_wait"}


def test_resume_of_three_ranks(project: Project, tmp_path: Path) -> None:
    """DDP sums in another order in a process's first step; not, if that was a throw-away pass."""

    def unsettled() -> None:
        replicas._settle_buckets = lambda *_: None

    data = project.draw(tmp_path / "set", 38, 6)  # three steps
    runs = Runs(project, data, tmp_path, 3, *NET, "--workers", 0)
    assert runs.result("whole") == runs.result("stopped", 2)
    spoilt = [runs.result(f"unsettled{len(stop)}", *stop, spoil=unsettled) for stop in ((), (2,))]
    assert spoilt[0] != spoilt[1]


def test_resume_on_another_number_of_ranks(project: Project, data: Path, tmp_path: Path) -> None:
    """The same images in the same order, in whole steps; what cannot be the same is said."""

    def whole_steps() -> None:
        passes, wrap, end_step = [], replicas.wrap, Run.end_step

        def counting(*args: object) -> object:
            ddp_model = wrap(*args)
            ddp_model.register_forward_pre_hook(lambda *_: passes.append(1))
            return ddp_model

        def checked(self: Run) -> None:
            assert len(passes) % 2 == 0, len(passes)
            end_step(self)

        ddpkit.wrap, Run.end_step = counting, checked

    flags = data, tmp_path, "--image-size", 32, "--epochs", 2, "--save-every", 2
    assert project.train(*flags, patch=after_step(8, kill)).statuses == [-9, -9]
    accumulating = "--batch-size", 3, "--accumulate", 2
    said = project.train(*flags, *accumulating, on=1, patch=whole_steps).ok().out
    assert "1 of 2 epochs done" in said
    assert " and 2 steps of the next; 2 rank(s) then, 1 now: BatchNorm" in said
    assert "--batch-size" in said
    # 37 images are left of that epoch: six steps of 6.
    assert [row["step"] for row in rows(tmp_path)] == ["6", str(8 + 6)]


def test_workers_do_not_change_what_is_learnt(project: Project, few: Path, tmp_path: Path) -> None:
    """With dropout, whose random numbers loader workers must not share or shift."""
    weights = []
    for workers in 0, 2:
        more = ["--arch", "squeezenet1_1", "--workers", workers]
        project.train(few, tmp_path / str(workers), *more, on=1).ok()
        weights.append(torch.load(tmp_path / str(workers) / "last.pt")["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_training_set_that_changes(project: Project, few: Path, tmp_path: Path) -> None:
    """In mid-epoch the rest of its images would be others: the epoch starts over, and says so."""
    own, out = shutil.copytree(few, tmp_path / "own"), tmp_path / "out"
    flags = "--image-size", 32, "--save-every", 1
    done = project.train(own, out, *flags, on=1, patch=after_step(2, kill))
    assert done.statuses == [-9], done.err
    image = min((own / "train").rglob("*.jpg"))
    image.rename(image.with_stem(f"z{image.stem}"))
    for name in "renamed", "unknown":  # of a checkpoint that does not know its training set
        copy = shutil.copytree(out, tmp_path / name)
        if name == "unknown":
            state = torch.load(copy / "last.pt")
            del state["training_set"]
            torch.save(state, copy / "last.pt")
        said = project.train(own, copy, *flags, on=1).ok().out
        assert "0 of 1 epochs done and 2 steps of the next" in said
        assert "the epoch starts over" in said
    image.with_stem(f"z{image.stem}").rename(image)
    assert "starts over" not in project.train(own, out, *flags, on=1).ok().out


def test_ranks_with_other_data(project: Project, few: Path, trained: Path, tmp_path: Path) -> None:
    """Nothing is learnt or measured."""
    copy, out = shutil.copytree(few, tmp_path / "copy"), shutil.copytree(trained, tmp_path / "out")
    first = min((copy / "val" / "dots").iterdir())
    first.rename(first.with_stem("a"))

    def patch() -> None:
        if os.environ["RANK"] == "1":
            sys.argv[sys.argv.index("--data") + 1] = str(copy)

    for folder, more in (tmp_path / "new", []), (out, ["--eval-only"]):
        done = project.train(few, folder, *more, patch=patch)
        done.refused("machine.check_alike", "rank 1 has 6 images (", "rank 0 has 6 images (")
        assert done.statuses == [2, 2]
    assert not list((tmp_path / "new").rglob("*.pt"))


@both_tasks
def test_metrics_on_any_number_of_ranks(project: Project, tmp_path: Path) -> None:
    """Of 1, 5 and 53 images: fewer than ranks, void, and a class that never comes."""
    data = project.draw(tmp_path / "set", 6, 53)
    if project.task == "segmentation":
        (data / "classes.txt").write_text("background\ncrack\nnever\n")
        for n, path in enumerate(sorted((data / "val" / "masks").iterdir())):
            mask = np.array(Image.open(path))
            mask[: 5 * (n % 7)] = 255
            Image.fromarray(mask).save(path)

    @on_ranks(1, 2, 3)
    def measure(project: Project) -> None:
        import dataset
        import main
        import model
        from flags import parse_args

        args = parse_args(["--data", str(data), "--image-size", "32", "--amp", "off"])
        _, val, classes = dataset.build_datasets(args)
        samples.seed(1)
        net = model.build_model(args, classes)
        criterion = ddpkit.criterion(model.build_criterion(args, val, classes))
        for size in 1, 5, 53:
            part = Subset(val, list(range(0, 53, 53 // size))[:size])
            loader = DataLoader(
                ddpkit.Seeded(part, classes, args.seed),
                batch_sampler=ddpkit.ValSampler(part, 2),
                collate_fn=ddpkit.Collate(),
            )
            metrics = model.build_metrics(classes)
            found, (confusion, worst) = main.evaluate(net, loader, criterion, metrics, args)
            if distributed.rank():  # rank 0 alone has all of them
                continue
            assert worst
            now = [*found.values(), confusion.tolist(), json.loads(json.dumps(worst))]
            path = tmp_path / f"of {size}"
            if distributed.world_size() == 1:
                path.write_text(json.dumps(now))
            loss, *then = json.loads(path.read_text())
            assert now[0] == pytest.approx(loss, rel=1e-14)
            assert str(now[1:]) == str(then)  # NaN for NaN
            # The class that never comes is predicted here and there, or nowhere.
            assert not (never := found.get("iou_never", 0)) or math.isnan(never)

    measure(project=project)
    assert len({(tmp_path / f"of {size}").read_text() for size in (1, 5, 53)}) == 3


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@on_ranks(1, group=False)
def test_deterministic_metrics_take_no_more_memory(project: Project) -> None:
    """For what is told to be deterministic torchmetrics takes pixels x classes squared: 0.9 GB."""
    import distributed
    import model

    def peak() -> int:  # kilobytes
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    distributed.setup(seed=0, deterministic=True)
    metrics = model.build_metrics([str(number) for number in range(21)])
    logits, targets = torch.zeros(2, 21, 256, 256), torch.zeros(2, 256, 256, dtype=torch.long)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    metrics.update(logits, targets)
    ddpkit.compute(metrics)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert peak() - before < 300_000


def test_a_disk_that_does_not_answer(project: Project, few: Path, tmp_path: Path) -> None:
    """One line that names the file, and the status of a failure, after which a job starts again."""

    def patch() -> None:
        def fail(path: Path | str) -> bytes:
            return files.retried(path, stale, path)

        def stale(path: Path | str) -> bytes:
            raise OSError(116, "Stale file handle", str(path))

        def start(worker: int) -> None:
            files.read, files.WAITS = fail, (0,)
            start_worker(worker)

        start_worker, process.start_worker = process.start_worker, start

    done = project.train(few, tmp_path, "--workers", 1, patch=patch)
    done.failed("files.failure", ".jpg", "Stale file handle")
    assert done.statuses == [1, 1]
