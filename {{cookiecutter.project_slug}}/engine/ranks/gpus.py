"""Which GPUs a rank will see, found out without torch if that can be."""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

from engine.errors import UserError

SMI_SECONDS = 60  # it takes some seconds where the driver is not kept loaded
VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev/nvidiactl"), Path("/dev/kfd")  # of containers without nvidia-smi; of AMD


def wanted() -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it; None if it is not set.

    It ends at the first word that names none: "", "-1", "none" and SLURM's "NoDevFiles" give [].
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    kind = re.match("GPU-|MIG-", text)
    name = re.compile(f"{kind[0]}.+" if kind else r"\s*\+?(\d+)")
    found = itertools.takewhile(bool, map(name.match, text.split(",")))
    return [each[0] if kind else str(int(each[1])) for each in found if each]


def by_nvidia_smi() -> tuple[list[str], str] | None:
    """Return the UUIDs of all GPUs, and what nvidia-smi says; None if there is no nvidia-smi.

    Raises a UserError if it hangs, as it does if a GPU has failed.
    """
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--list-gpus"]
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        out, err = started.communicate(timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        started.kill()  # without waiting: in the driver it may not end
        remedy = "restart this node or leave it out, or train on CPUs with CUDA_VISIBLE_DEVICES="
        raise UserError(
            f"nvidia-smi has not answered in {SMI_SECONDS} s, as if a GPU has failed: {remedy}"
        ) from None
    uuids = [re.search(r"UUID: ([^)]*)", line) for line in re.findall("^GPU.*", out, re.MULTILINE)]
    return [found[1] if found else "" for found in uuids], (out + err).strip()


def count() -> int:
    """Return the number of GPUs that a rank will see."""
    names = wanted()
    if names == []:
        return 0
    if listed := by_nvidia_smi():
        return len(listed[0]) if names is None else count_known(names, listed[0])
    if any(device.exists() for device in DEVICES) or _is_for_xpu():
        import torch  # which knows the variables of other makers, too

        return torch.accelerator.device_count()
    return len(names or [])


def count_known(names: list[str], uuids: list[str]) -> int:
    """Return how many of `names` CUDA would show: those before the first that there is not."""
    if len({*names}) < len(names):
        return 0
    if names[0].startswith("MIG-"):
        return 1  # a process gets no more

    def is_known(name: str) -> bool:
        if name.isdecimal():
            return int(name) < len(uuids)
        return sum(uuid.startswith(name) for uuid in uuids) == 1

    return len([*itertools.takewhile(is_known, names)])


def _is_for_xpu() -> bool:
    """Return whether the installed torch is built for Intel's GPUs."""
    found = importlib.util.find_spec("torch")
    folder = Path(found.origin).parent if found and found.origin else None
    return folder is not None and any(folder.glob("lib/*torch_xpu*"))
