"""What launchers say through environment variables: torchrun's names, and srun's put into them."""

import itertools
import os
import re
import socket
import subprocess
import sys
import time

from engine.errors import UserError


def adopt_slurm_step() -> bool:
    """Set torchrun's variables from those of `srun python main.py`; return whether it was used.

    A plain start in a batch script or in an interactive allocation is not a step of several
    tasks; it stays a group of one.
    """
    env = os.environ
    if "RANK" in env or int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return False
    per_node: list[str] = []  # "2(x3),1" means 2, 2, 2, 1
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
        per_node += [tasks] * int(times or 1)
    command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
    hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    step = int(env["SLURM_JOB_ID"]) * 7 + int(env["SLURM_STEP_ID"])
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = per_node[int(env["SLURM_NODEID"])]
    env.setdefault("MASTER_ADDR", hosts[0])
    env.setdefault("MASTER_PORT", str(20000 + step % 10000))  # one per step, the same on all tasks
    return True


def read_group() -> tuple[str, int, int, int]:
    """Return MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; raise a UserError if one is missing."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "")
        if not value or not (value.isdecimal() or name == "MASTER_ADDR"):
            what = f"{name}={value} is not a number" if value else f"RANK is set, {name} is not"
            raise UserError(f"{what}: start with ./launch.sh or torchrun, or unset RANK")
    env = os.environ
    return env["MASTER_ADDR"], int(env["MASTER_PORT"]), int(env["RANK"]), int(env["WORLD_SIZE"])


def wait_for_name(host: str, seconds: float = 60) -> None:
    """Return once `host` resolves, which may take a while after its node has started.

    Raises a UserError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    for attempt in itertools.count():
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            line = f"MASTER_ADDR={host} cannot be resolved ({error.strerror})"
        if time.monotonic() > deadline:
            raise UserError(f"{line}: check the name, or use an IP address")
        if attempt == 0 and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print(f"{line}; trying for {seconds:g} s", file=sys.stderr, flush=True)
        time.sleep(1)
