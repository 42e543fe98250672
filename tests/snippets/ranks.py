"""Launching, devices and statuses, without any process group of several ranks."""

import os
import sys
from types import SimpleNamespace

import torch

from engine.errors import UserError
from engine.ranks import distributed, launcher


def causes(*pairs: list[int]) -> list[int]:
    """The status that counts of two ranks' statuses, in the order of time, for each pair."""
    found = []
    for statuses in pairs:
        failures = {
            i: SimpleNamespace(exitcode=status, timestamp=i) for i, status in enumerate(statuses)
        }
        error = SimpleNamespace(
            failures=failures, get_first_failure=lambda failures=failures: (0, failures[0])
        )
        found.append(launcher.root_cause(error)[1].exitcode)
    return found


def device_of_three(is_debugged: bool) -> str:
    """The device of three ranks on a machine that claims two GPUs, or why there is none."""
    if is_debugged:
        sys.modules["pydevd"] = SimpleNamespace()
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="3")
    try:
        return str(distributed._pick_device(False))
    except UserError as error:
        return str(error)
