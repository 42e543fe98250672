"""TensorBoard's files of a run, and what is logged of a step."""

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpkit import files
from ddpkit.run.file_names import EVENTS
from ddpkit.vision.beside import Beside


class Board:
    """TensorBoard's SummaryWriter for a folder, opened at its first use; its errors are a line.

    done: how many steps, or epochs, are done; what the folder has of later ones, of a run that was
    killed, is dropped. Where it is not `active`, and in a forked child, it does nothing.
    """

    def __init__(self, folder: Path, done: int, active: bool, beside: Beside) -> None:
        self._folder = folder
        self._beside = beside
        self._first = done + 1
        self._process = os.getpid() if active else 0  # its thread is not in a fork
        self._writer: object = None
        # TensorBoard reads one file after the other, and at a mark in one it drops what
        # the files before have of later steps.
        self._drops_later = any(folder.glob(EVENTS))

    def is_here(self) -> bool:
        """Return whether it is active, and this is no forked child."""
        return os.getpid() == self._process

    def drop_later(self) -> None:
        """Open the file, if there are others: its mark has to come before any that is opened."""
        if self._drops_later:
            self.get_logdir()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        failed = f"{self._folder} gets no TensorBoard files"
        is_here = self.is_here()
        if is_here and not self._writer and name not in ("flush", "close"):
            self._writer = self._beside(failed, self._open)
        if not is_here or not self._writer:
            return lambda *args, **named: None
        value = getattr(self._writer, name)
        if not callable(value):
            return value
        return functools.partial(self._beside, failed, value)

    def _open(self) -> object:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds

        files.make_folder(self._folder)
        # Where it cannot write, its thread prints a traceback.
        tempfile.TemporaryFile(dir=self._folder).close()
        # Some readers take the first mark for the beginning: a new folder has one that
        # drops nothing.
        first = self._first if self._drops_later else sys.maxsize
        return SummaryWriter(str(self._folder), purge_step=first)


class Entry(NamedTuple):
    """The numbers of a step, some of which may still be on their way from the device."""

    step: int
    at: str  # such as "epoch 1/30  step 50/391"
    lr: float
    img_per_s: float
    # on the CPU: the loss, and the norm of the gradient if that is known
    values: Tensor
    event: torch.Event | None  # after which `values` are there; None: they are
