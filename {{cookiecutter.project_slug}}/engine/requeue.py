"""What a start of a batch job leaves for its next start, perhaps on other nodes: slurm/train.sbatch.

Two files, which variables name, in a folder that all nodes share. Without the variables there are
none.
"""

import contextlib
import os
import socket
from pathlib import Path

from engine.errors import UserError

SAVED_LIST = (
    "SAVED_LIST"  # the file with "<node> <output folder>" for each folder with a checkpoint
)
FAILED_LIST = "FAILED_LIST"  # the file with the nodes on which something has failed


def node() -> str:
    """Return this node's name: SLURM's, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def blame(name: str) -> None:
    """Tell the batch script that something has failed on that node."""
    if name:
        _append(FAILED_LIST, name)


def note_checkpoint(folder: Path) -> None:
    """Tell later starts that `folder` has a checkpoint."""
    if os.path.abspath(folder) not in _saved():
        _append(SAVED_LIST, f"{node()} {os.path.abspath(folder)}")


def check_new(folder: Path) -> None:
    """Raise a UserError if an earlier start of this job had a checkpoint in `folder`.

    It has none now: a disk that the nodes do not share, or the files have been removed.
    """
    if then := _saved().get(os.path.abspath(folder)):
        raise UserError(
            f"--output-dir {folder}: this job has saved there before, on node {then}, but "
            f"{node()} has no checkpoint of it: use a folder that all nodes share; to start "
            "over, submit a new job"
        )


def _saved() -> dict[str, str]:
    """Return the node on which each folder got a checkpoint first."""
    with contextlib.suppress(OSError, KeyError):
        lines = Path(os.environ[SAVED_LIST]).read_text().splitlines()
        return {folder: name for name, folder in (line.split(" ", 1) for line in lines)}
    return {}


def _append(variable: str, line: str) -> None:
    with contextlib.suppress(OSError, KeyError), open(os.environ[variable], "a") as file:
        file.write(f"{line}\n")
