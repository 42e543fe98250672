"""What a run reports within an epoch: lines, TensorBoard's curves, a writer that owners share."""

import contextlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from generated import Done, Project, after_step, die, rows
from ranks import Patch, on_ranks, setup
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpkit
from ddpkit import files
from ddpkit.ranks import devices, distributed
from ddpkit.run.file_names import STEPS
from ddpkit.vision import pictures, reporting
from ddpkit.vision.reporting import Reporter

CPU = torch.device("cpu")


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard reads in a folder: the values of each name by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {
        name: {each.step: each.value for each in found.Scalars(name)}
        for name in found.Tags()["scalars"]
    }


def take(
    report: Reporter, steps: range, read: Callable[[int], int] = lambda step: step
) -> None:
    """Train for an epoch of these steps, of 8 images on all ranks; the loss is a tenth of each."""
    batch_size = 8 // distributed.world_size()
    for step in report.progress(map(read, steps), 0, len(steps), batch_size):
        loss = torch.tensor(step / 10).double()
        norm = torch.tensor(step + 0.5)
        report.log_step(step, loss, 0.00125, norm, f"{step}/9")


@on_ranks(2)
def test_lines_and_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal a line on rank 0, with one the bar's words; both in TensorBoard."""
    rank = distributed.rank()
    lines: list[str] = []
    shown = io.StringIO()
    seconds = [0]

    def read(step: int) -> int:
        seconds.append(seconds[-1] + step)
        return step

    monkeypatch.setattr(distributed, "print0", lines.append)
    monkeypatch.setattr(time, "monotonic", lambda: seconds[-1])
    report = Reporter(tmp_path, 1, log_every=2, device=CPU)
    take(report, range(1, 6), read)
    report.flush()
    take(report, range(6, 7), read)
    monkeypatch.setattr(reporting, "_is_on_terminal", lambda: True)
    with contextlib.redirect_stderr(shown):
        take(report, range(7, 9), read)
    report.writer.add_scalar("mine", 3.0, 8)
    report.close()
    if rank:
        assert not lines
        assert not report.pending
        assert not shown.getvalue().count("loss")
        return
    # since the entry before, or the beginning of the epoch
    words = [
        "epoch 1/1  step 2/9  loss 0.2  lr 0.00125  grad 2.5  5 img/s",
        "epoch 1/1  step 4/9  loss 0.4  lr 0.00125  grad 4.5  2 img/s",
        "epoch 1/1  step 6/9  loss 0.6  lr 0.00125  grad 6.5  1 img/s",
    ]
    assert lines == words
    assert "loss=0.8, lr=0.00125, grad=8.5" in shown.getvalue()
    found = scalars(tmp_path / "steps")
    assert found["loss"] == pytest.approx({2: 0.2, 4: 0.4, 6: 0.6, 8: 0.8})
    assert found["grad_norm"] == {2: 2.5, 4: 4.5, 6: 6.5, 8: 8.5}
    assert found["lr"] == pytest.approx(dict.fromkeys((2, 4, 6, 8), 0.00125))
    assert found["mine"] == {8: 3.0}
    assert found["img_per_s"] == pytest.approx(
        {2: 16 / 3, 4: 16 / 7, 6: 8 / 6, 8: 16 / 15}
    )


@on_ranks(1)
def test_resume(tmp_path: Path) -> None:
    """TensorBoard has each step once, whatever was killed, and however many write there."""
    from torch.utils.tensorboard import SummaryWriter

    for first, last in (
        (0, 6),
        (3, 7),
        (6, 8),
    ):
        report = Reporter(tmp_path, 1, log_every=1, step=first, device=CPU)
        report.writer.drop_later()
        beside = SummaryWriter(str(tmp_path / "steps"))
        for step in range(first + 1, last + 1):
            take(report, range(step, step + 1))
            report.writer.add_scalar("mine", first, step)
            beside.add_scalar("beside", first, step)
        report.flush()  # after which it may be killed
        beside.close()
    found = scalars(tmp_path / "steps")
    of_processes = {
        **dict.fromkeys((1, 2, 3), 0),
        **dict.fromkeys((4, 5, 6), 3),
        7: 6,
        8: 6,
    }
    assert found["mine"] == found["beside"] == of_processes
    assert list(found["loss"]) == list(found["grad_norm"]) == list(range(1, 9))
    assert len(list((tmp_path / "steps").iterdir())) == 6


@on_ranks(1)
def test_what_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file without an entry; in a fork, and after the end of all epochs, no writer."""
    report = Reporter(tmp_path, 1, device=CPU)
    take(report, range(1, 200))
    report.close()
    report = Reporter(tmp_path, 1, log_every=1, device=CPU)
    complete = SimpleNamespace(epoch=1, step=9, history=[{"epoch": 1}], device=CPU)
    monkeypatch.setattr(reporting, "recorded_rows", lambda _: complete.history)
    assert report.begin_run(complete)
    report.writer.add_scalar("mine", 1, 1)
    take(report, range(1, 2))
    report.close()
    assert not list(tmp_path.iterdir())
    report = Reporter(tmp_path, 1, log_every=1, device=CPU)
    take(report, range(1, 2))
    child = os.fork()
    if child == 0:
        # the queue of a writer whose thread is not there would be full
        for step in range(99):
            report.writer.add_scalar("mine", 1, step)
        report.close()
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    report.close()
    assert scalars(tmp_path / "steps").keys() == {
        "loss",
        "lr",
        "grad_norm",
        "img_per_s",
    }


class Event:
    """Of a device, that has not come so far until `done`."""

    made: ClassVar[list["Event"]] = []

    def __init__(self) -> None:
        self.done = False
        self.is_waited_for = False
        self.made.append(self)

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.is_waited_for = True


@on_ranks(1)
def test_a_device_that_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step writes what has arrived, and waits for nothing; the end of an epoch does."""
    lines: list[str] = []
    monkeypatch.setattr(distributed, "print0", lines.append)
    monkeypatch.setattr(
        torch, "get_device_module", lambda _: SimpleNamespace(Event=Event)
    )
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(devices, "for_sums", lambda _: device)
    report = Reporter(tmp_path, 1, log_every=1, device=CPU)
    to = torch.Tensor.to

    def as_cpu(self: torch.Tensor, *how: object, **options: object) -> torch.Tensor:
        if how and how[0] is device:
            how = how[1:]
        return to(self, *how, **options)

    monkeypatch.setattr(torch.Tensor, "to", as_cpu)
    take(report, range(1, 4))
    first, second, third = Event.made
    assert not lines
    second.done = True  # in order, though
    for _ in report.progress(range(2), 0, 2, 8):
        assert len(lines) == (2 if first.done else 0)
        first.done = True
    assert len(lines) == 2
    assert not third.is_waited_for
    report.flush()
    assert len(lines) == 3
    assert third.is_waited_for
    assert not first.is_waited_for
    # at the end of a run it is waited for a little
    for step, arrives in (4, True), (5, False):
        monkeypatch.setattr(reporting, "CLOSING_SECONDS", 99 if arrives else 0.1)
        monkeypatch.setattr(
            time,
            "sleep",
            lambda _, arrives=arrives: setattr(Event.made[-1], "done", arrives),
        )
        take(report, range(step, step + 1))
        report.close()
        last = Event.made[-1]
        assert len(lines) == 4
        assert last.done == arrives
        assert not last.is_waited_for


def use_reporter(folder: Path) -> None:
    """A loop of somebody's own: two epochs of 12 images, and a third after a restart."""
    data = TensorDataset(torch.arange(12.0))
    sampler = None
    if distributed.is_joined():
        sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    for first, last in (0, 2), (2, 3):
        done = first * len(loader)
        report = Reporter(folder, 3, log_every=3, epoch=first, step=done)
        for epoch in range(first, last):
            for step, (images,) in enumerate(report.progress(loader, epoch), 1):
                report.log_step(epoch * len(loader) + step, images.mean(), 0.5)
            report.log_epoch({"loss": 3.0 - epoch, **report.speed()}, is_best=True)
        report.close()


def check_report(folder: Path, lines: list[str], ranks: int) -> None:
    """What rank 0 has written of `use_reporter`."""
    of_steps = [line for line in lines if "  step " in line]
    of_epochs = [line for line in lines if line not in of_steps]
    words = r"epoch {}/3  step {}  loss \S+  lr 0.5  \d+ img/s"
    due = range(3, 18 // ranks + 1, 3)
    for line, step in zip(of_steps, due, strict=True):
        epoch = (step - 1) * ranks // 6 + 1
        assert re.fullmatch(words.format(epoch, step), line)
    header = "               loss       eta"
    # again where the second of the two loops goes on
    assert [line for line in of_epochs if not line.startswith("epoch")] == [header] * 2
    assert of_epochs[0] == of_epochs[3] == header
    lines = [line for line in of_epochs if line != header]
    for number, line in enumerate(lines, 1):
        shown = rf"epoch {number}/3    {4 - number}\.0000     \d\d:\d\d  best"
        assert re.fullmatch(shown, line)
    assert [row["loss"] for row in rows(folder)] == ["3.0", "2.0", "1.0"]
    assert [row["epoch"] for row in rows(folder)] == ["1", "2", "3"]
    for row in rows(folder):
        images = float(row["img_per_s"]) * float(row["train_seconds"])
        assert images == pytest.approx(12)  # of all ranks
    assert scalars(folder / "epochs")["loss"] == {1: 3.0, 2: 2.0, 3: 1.0}
    assert list(scalars(folder / "steps")["loss"]) == list(due)
    assert (folder / "curves.png").exists()


@on_ranks(1, 2, group=False)
def test_the_reporter_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Run, in a plain process and in a group that a script has made: rank 0 writes."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    lines: list[str] = []
    monkeypatch.setattr(distributed, "print_line", lambda line, _: lines.append(line))
    folder = tmp_path / f"of {ranks}"
    use_reporter(folder)
    if distributed.rank() == 0:
        check_report(folder, lines, ranks)
    else:
        assert not lines


@on_ranks(1, group=False)
def test_the_reporter_with_checkpoints(tmp_path: Path) -> None:
    """Stopped within an epoch, and killed after its row was written: each row and step once."""
    data = TensorDataset(torch.arange(12.0))
    for stop_at, dies_after_row in (9, False), (99, True), (99, False):
        loader = ddpkit.train_loader(data, 2)
        count = torch.nn.Linear(1, 1)
        checkpoints = ddpkit.Checkpoints(tmp_path, save_every=1, count=count)
        report = ddpkit.Reporter(
            tmp_path, 3, log_every=2, epoch=checkpoints.epoch, step=checkpoints.step
        )
        with contextlib.suppress(InterruptedError):
            for epoch in checkpoints.epochs(3):
                batches = checkpoints.steps(loader)
                for (images,) in report.progress(batches, epoch, len(loader), 2):
                    if checkpoints.step + 1 == stop_at:
                        raise InterruptedError
                    report.log_step(checkpoints.step + 1, images.mean(), 0.5)
                report.log_epoch({"mean": float(epoch), **report.speed()})
                if dies_after_row:
                    raise InterruptedError
        report.close()
        files._leave_locks()  # as the end of the process does
    assert [row["epoch"] for row in rows(tmp_path)] == ["1", "2", "3"]
    assert [row["mean"] for row in rows(tmp_path)] == ["0.0", "1.0", "2.0"]
    assert scalars(tmp_path / "epochs")["mean"] == {1: 0.0, 2: 1.0, 3: 2.0}
    assert list(scalars(tmp_path / "steps")["loss"]) == list(range(2, 19, 2))


@on_ranks(1, group=False)
def test_rows_of_a_report_that_goes_on(tmp_path: Path) -> None:
    """Columns that come later, text, numbers of NumPy; rows that a crash has cut are left out."""
    first = {"top1": np.float32(0.5), "note": "007"}
    second = {"top1": 0.75, "note": "12e5", "top5": torch.tensor(0.875)}
    report = ddpkit.Reporter(tmp_path, 4)
    report.log_epoch(first)
    report.log_epoch(second)
    report.close()
    expected = [
        {"epoch": 1, "top1": 0.5, "note": "007"},
        {"epoch": 2, "top1": 0.75, "note": "12e5", "top5": 0.875},
    ]
    assert report.rows == expected
    path = tmp_path / "metrics.csv"
    # the last one is longer than the csv module reads
    damage = b"3,0.8\n\0\0\0\0\n4," + b"x" * 200_000
    path.write_bytes(path.read_bytes() + damage)
    report = ddpkit.Reporter(tmp_path, 4, epoch=2)
    assert report.rows == expected
    report.log_epoch({"top1": 1.0, "top5": "none"})
    report.close()
    assert [row["epoch"] for row in rows(tmp_path)] == ["1", "2", "3"]
    assert [row["top5"] for row in rows(tmp_path)] == ["", "0.875", "none"]
    assert [row["note"] for row in rows(tmp_path)] == ["007", "12e5", ""]
    assert scalars(tmp_path / "epochs")["top1"] == {1: 0.5, 2: 0.75, 3: 1.0}


@on_ranks(2)
def test_the_rank_that_waits_longest(tmp_path: Path) -> None:
    """What it waits for batches is what all ranks report."""
    report = Reporter(tmp_path, epochs=1, device=CPU)
    seconds = 0.2 * distributed.rank()

    def batches() -> Iterator[int]:
        for number in range(2):
            time.sleep(seconds)
            yield number

    for _ in report.progress(batches(), 0, 2, 1):
        pass
    speed = report.speed()
    found = distributed.gather_objects(speed["data_wait"] * speed["train_seconds"])
    assert min(found) > 0.35


@on_ranks(1)
def test_the_reporter_closes_it(tmp_path: Path) -> None:
    """Also on a disk that is full."""
    report = Reporter(tmp_path, epochs=2, log_every=2, device=CPU)

    def fail() -> Any:
        raise OSError(28, "No space left on device")

    for _ in report.progress(range(3), 0, 3, 1):
        pass
    report.log_step(2, torch.ones(()), 0.1)
    writer = report.writer._writer
    writer.flush = fail
    close = writer.close
    writer.close = fail
    report.close()
    close()
    assert json.dumps(list(scalars(tmp_path / STEPS)["loss"])) == "[2]"


@on_ranks(1)
def test_what_lies_beside_training(tmp_path: Path) -> None:
    """Where a file cannot be written, or a drawing or a tracker fails: a line of each, once.

    Another Reporter in the same process says it, too.
    """
    for folder in STEPS, "epochs":
        (tmp_path / folder).touch()
    (tmp_path / "metrics.csv").mkdir()
    pictures.draw_curves = lambda *_: 1 / 0
    lines: list[str] = []
    distributed.print0 = lines.append
    tracker = lambda _: ("mine", lambda row: 1 / 0)  # noqa: E731
    options = {"log_every": 1, "device": CPU, "tracker": tracker}
    report = Reporter(tmp_path, epochs=2, **options)
    for epoch in range(2):
        for _ in report.progress(range(3), epoch, 3, 1):
            pass
        report.log_step(epoch + 1, torch.ones(()), 0.1)
        report.writer.add_scalar("mine", 1, epoch)
        report.log_epoch({"top1": 0.5})
    report.close()
    said = sorted(
        line for line in lines if line.endswith(": the run continues without it")
    )
    found = [line.split(" (")[0].removeprefix(f"{tmp_path}/") for line in said]
    assert found == [
        "curves.png was not drawn",
        "epochs gets no TensorBoard files",
        "metrics.csv was not written",
        "steps gets no TensorBoard files",
        "the tracker did not accept a row",
    ]
    Reporter(tmp_path, epochs=1, device=CPU).log_epoch({"top1": 0.5})
    assert sum("metrics.csv was not written" in line for line in lines) == 2


@on_ranks(2, group=False)
def test_a_tracker_that_takes_long(tmp_path: Path) -> None:
    """The other ranks wait, at its start and for each row, as long as it takes."""
    setup(timeout=2)

    def start(_: object) -> Any:
        time.sleep(3)
        return "mine", lambda row: time.sleep(3)

    report = Reporter(tmp_path, epochs=1, device=CPU, tracker=start)
    report.start_tracker()
    distributed.barrier()
    report.rows.append({"epoch": 1})
    report.log_last_row(is_best=False)
    distributed.barrier()


@on_ranks(1, 2, group=False)
def test_a_tracker_in_a_loop_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name: it starts with the first row, on rank 0, with the flags; a later start goes on."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    folder = tmp_path / f"of {ranks}"
    rows_taken: list[Any] = []
    starts: list[Any] = []

    def init(**options: Any) -> Any:
        starts.append((options["id"], dict(options["config"])))
        log = lambda row, step: rows_taken.append((step, row))  # noqa: E731
        return SimpleNamespace(id="a1b2", log=log)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    flags = {"lr": 0.5}
    for epoch in range(2):
        report = Reporter(folder, 2, epoch=epoch, device=CPU, tracker="wandb")
        report.note_facts(flags=flags)
        assert len(starts) == (0 if distributed.rank() else epoch)
        report.log_epoch({"top1": 0.5 + epoch, "step": 9})
        report.close()
    if distributed.rank():
        assert not starts
        assert not rows_taken
        return
    assert starts == [(None, flags), ("a1b2", flags)]
    expected = [(n + 1, {"epoch": n + 1, "top1": 0.5 + n}) for n in range(2)]
    assert rows_taken == expected
    assert json.loads((folder / "args.json").read_text()) == {"flags": flags}


@on_ranks(1)
def test_a_folder_of_a_group(tmp_path: Path) -> None:
    """Whoever can write it can write the folders in it, whatever the umask."""
    os.umask(0o022)
    tmp_path.chmod(0o2770)
    report = Reporter(tmp_path, epochs=1, device=CPU)
    report.writer.add_scalar("mine", 1, 1)
    report.log_epoch({"top1": 0.5})
    report.close()
    for folder in STEPS, "epochs":
        assert (tmp_path / folder).stat().st_mode & 0o7777 == 0o2775


def test_a_run(project: Project, few: Path, tmp_path: Path) -> None:
    """Its lines say what the epoch's row does; stopped and resumed it has each step once."""

    def train(patch: Patch | None = None) -> Done:
        words = "--log-every", 2, "--save-every", 1, "--batch-size", 3, "--epochs", 2
        return project.train(few, tmp_path, words, patch=patch)

    killed = train(after_step(6, die))
    assert killed.statuses == [-9, -9]
    said = killed.out + train().ok().out
    line = r"epoch (\d)/2  step (\d)/4  loss (\S+)  lr \S+  grad \S+  \d+ img/s"
    found = re.findall(line, said)
    assert [epoch + step for epoch, step, _ in found] == ["12", "14", "22", "24"]
    losses = [float(loss) for _, _, loss in found]
    means = [float(row["train_loss"]) for row in rows(tmp_path)]
    assert means == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2], rel=1e-3)
    assert list(scalars(tmp_path / "steps")["loss"]) == [2, 4, 6, 8]
