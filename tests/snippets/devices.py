"""Runs whose ranks claim devices that are not there, or that nothing carries collectives for."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import run
from torch.nn.parallel import DistributedDataParallel

from engine.ranks import devices, distributed


def claimed(folder: str, *names: str) -> list:
    """Statuses of ranks that claim to have the GPUs `names`, and what they print."""

    def claim() -> None:
        name = names[int(os.environ["RANK"])]
        note = {"device": "cuda" if name else "cpu", "gpu": name, "mistake": ""}
        devices.pick = lambda **_: (devices.CPU, note)

    output = f"{folder}/claimed"
    statuses = run(len(names), "--output-dir", f"{output}.run", patch=claim, output=output)
    return [statuses, *(Path(f"{output}.{end}").read_text() for end in ("out", "err"))]


def as_apple(folder: str, *flags: object) -> list:
    """Status and output of a run on the CPU where collectives and float64 are as on Apple's GPUs.

    It ends with an error if a collective gets anything of the run's, or one of float64.
    """

    def patch() -> None:
        devices.has_collectives = lambda _: False
        devices.double = lambda _: torch.float32
        for name in ("all_reduce", "broadcast", "all_gather"):
            setattr(dist, name, checked(getattr(dist, name)))
        DistributedDataParallel.__init__ = refuse
        for name in ("reduce_tensor", "gather"):
            setattr(distributed, name, single(getattr(distributed, name)))

    def checked(collective: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            assert tensor.shape == () and tensor.dtype == torch.float32, tensor
            return collective(tensor, *args, **options)

        return call

    def single(collective: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
            assert tensor.dtype != torch.float64
            return collective(tensor, *args)

        return call

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("DDP")

    output = f"{folder}/apple"
    words = [*flags, "--output-dir", f"{output}.run"]
    statuses = run(1, *words, patch=patch, output=output, draws=False)
    return [statuses, *(Path(f"{output}.{end}").read_text() for end in ("out", "err"))]
