"""Launching, devices and statuses, without any process group of several ranks."""

import os

import torch

import main
from engine.errors import UserError
from engine.ranks import devices, distributed


def device_of_three(is_debugged: bool) -> str:
    """The device of three ranks on a machine that claims two GPUs, or why there is none."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="3")
    try:
        return str(devices.pick(False, is_debugged))
    except UserError as error:
        return str(error)


def local_rank(flag: str, given: str | None) -> int:
    """What `flag` comes to, of main.py, where LOCAL_RANK is `given`."""
    os.environ.pop("LOCAL_RANK", None)
    if given:
        os.environ["LOCAL_RANK"] = given
    distributed.setup(main.parse_args([flag]).local_rank)
    return distributed.local_rank()
