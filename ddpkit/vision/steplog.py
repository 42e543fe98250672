"""What a run reports within an epoch, every so many steps: a line, and TensorBoard's curves."""

import contextlib
import functools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ddpkit import files
from ddpkit.ranks import devices, distributed
from ddpkit.run.file_names import EVENTS, STEPS
from ddpkit.vision.beside import Beside

CLOSING_SECONDS = 2


class Board:
    """TensorBoard's SummaryWriter for a folder, opened at its first use; its errors are a line.

    done: how many steps, or epochs, are done; what the folder has of later ones, of a run that was
    killed, is dropped. Where it is not `active`, and in a forked child, it does nothing.
    """

    def __init__(self, folder: Path, done: int, active: bool) -> None:
        self._folder = folder
        self._first = done + 1
        self._process = os.getpid() if active else 0  # its thread is not in a fork
        self._beside = Beside()
        self._writer: object = None
        # TensorBoard reads one file after the other, and at a mark in one it drops what
        # the files before have of later steps.
        self.drops_later = any(folder.glob(EVENTS))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        failed = f"{self._folder} gets no TensorBoard files"
        is_own = os.getpid() == self._process
        if is_own and not self._writer and name not in ("flush", "close"):
            self._writer = self._beside(failed, self._open)
        if not is_own or not self._writer:
            return lambda *args, **named: None
        value = getattr(self._writer, name)
        return (
            functools.partial(self._beside, failed, value) if callable(value) else value
        )

    def _open(self) -> object:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds

        files.make_folder(self._folder)
        # Where it cannot write, its thread prints a traceback.
        tempfile.TemporaryFile(dir=self._folder).close()
        # Some readers take the first mark for the beginning: a new folder has one that
        # drops nothing.
        first = self._first if self.drops_later else sys.maxsize
        return SummaryWriter(str(self._folder), purge_step=first)


class Entry(NamedTuple):
    """The numbers of a step, some of which may still be on their way from the device."""

    step: int
    at: str
    lr: float
    img_per_s: float
    values: Tensor
    event: torch.Event | None  # after which `values` are there; None: they are


class StepLog:
    """Logs every so many optimizer steps, on rank 0, and never waits for the device in a step.

    folder: of the run; TensorBoard's files are in its folder steps/. device: of the numbers.
    every: steps between entries; 0: none. first_step: the steps that were taken before; what
    TensorBoard has of later ones, of a run that was killed, is dropped. active: False: write
    nothing, as on other ranks.

        log = StepLog(folder, device, every=50)
        log.begin_epoch()
        for images, targets in loader:
            log.count_images(len(images))
            ...
            if log.is_due(step):
                log.add_step(step, f"step {step}", loss, lr)
        log.flush()
        log.close()
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        every: int,
        first_step: int = 0,
        active: bool = True,
    ) -> None:
        self.device = devices.for_sums(device)
        self.every = every
        self.active = active and distributed.is_rank_zero()
        self.process = os.getpid()
        self.pending: list[Entry] = []
        # run.writer.add_scalar("mine", value, run.step + 1), on all ranks
        self.writer = Board(folder / STEPS, first_step, self.active)
        self.bar: tqdm | None = None
        self.images = 0  # of all ranks, since the last entry
        self.since = time.monotonic()

    def begin_epoch(self, bar: tqdm | None = None) -> None:
        """Begin an epoch, or its rest. bar: what shows the numbers if there is a terminal."""
        # its mark has to come before any file that is opened from here on
        if self.writer.drops_later:
            self.writer.get_logdir()  # which opens it
        self.bar = None if bar is None or bar.disable else bar
        self.images = 0
        self.since = time.monotonic()

    def count_images(self, images: int) -> None:
        """Count images of all ranks, for the speed; write the entries that have arrived."""
        self.images += images
        self._write_arrived()

    def is_due(self, step: int) -> bool:
        """Return whether `step`, the number of an optimizer step from 1, is logged."""
        return self.every > 0 and step % self.every == 0

    def add_step(
        self,
        step: int,
        at: str,
        loss: Tensor,
        lr: float,
        grad_norm: Tensor | None = None,
    ) -> None:
        """Log a step that is due.

        step: optimizer steps taken. at: the beginning of the line, such as "epoch 1/30  step
        50/391". loss, grad_norm: scalars, on the device. Rank 0's numbers are what is written.
        """
        if not self.active:
            return
        img_per_s = self.images / max(time.monotonic() - self.since, 1e-9)
        scalars = [loss] if grad_norm is None else [loss, grad_norm]
        on_device = [each.detach().to(self.device, torch.float32) for each in scalars]
        # on the CPU: the loss, and the norm of the gradient if that is known
        values = torch.stack(on_device).to("cpu", non_blocking=True)  # pinned memory
        event = None
        if self.device.type != "cpu":
            event = torch.get_device_module(self.device).Event()
            event.record()
        self.pending.append(Entry(step, at, lr, img_per_s, values, event))
        self.writer.get_logdir()  # opening it takes seconds, which are not the next entry's
        self._write_arrived()
        self.images = 0
        self.since = time.monotonic()

    def flush(self) -> None:
        """Write what is pending, and have the disk get it; waits for the device."""
        for entry in self.pending:
            if entry.event:
                entry.event.synchronize()
        self._write_arrived()
        self.writer.flush()

    def close(self) -> None:
        """Write what arrives within CLOSING_SECONDS, and close the file.

        It does not wait for longer: after an error the device may never come so far.
        """
        if os.getpid() != self.process:
            return
        until = time.monotonic() + CLOSING_SECONDS
        with contextlib.suppress(RuntimeError):  # of a device that failed
            self._write_arrived()
            while self.pending and time.monotonic() < until:
                time.sleep(0.01)
                self._write_arrived()
        self.pending = []
        self.writer.close()

    def _write_arrived(self) -> None:
        while self.pending:
            entry = self.pending[0]
            if entry.event and not entry.event.query():
                return
            del self.pending[0]
            loss, *norm = entry.values.tolist()
            scalars = {"loss": loss, "lr": entry.lr, "img_per_s": entry.img_per_s}
            shown = {"loss": f"{loss:.4g}", "lr": f"{entry.lr:.3g}"}
            if norm:
                scalars["grad_norm"] = norm[0]
                shown["grad"] = f"{norm[0]:.3g}"
            if self.bar is not None:  # which shows the speed itself
                self.bar.set_postfix(shown)
            else:
                words = "  ".join(f"{name} {value}" for name, value in shown.items())
                distributed.print0(f"{entry.at}  {words}  {entry.img_per_s:.0f} img/s")
            for name, value in scalars.items():
                self.writer.add_scalar(name, value, entry.step)
