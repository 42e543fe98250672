"""What one start of a batch job leaves for the next, perhaps on other nodes: slurm/train.sbatch.

There are two files, which variables name, in a folder that all nodes share; without the variables
there are none.
"""

import contextlib
import os
from pathlib import Path

from engine.errors import UserError
from engine.ranks import environment

SAVED_LIST = "SAVED_LIST"  # "<node> <output folder>" for each folder that has got a checkpoint
FAILED_LIST = "FAILED_LIST"  # "<exit status> <node>" for each failure, the first one first


def note_failure(status: int, node: str | None = None) -> None:
    """Tell the batch script what has failed, and on which node; by default on this one.

    srun kills the other tasks and returns the highest of all statuses, often that of a victim.
    """
    _append(FAILED_LIST, f"{status} {environment.node() if node is None else node}")


def note_checkpoint(folder: Path) -> None:
    """Tell the job's later starts that `folder` has a checkpoint."""
    if os.path.abspath(folder) not in _saved():
        _append(SAVED_LIST, f"{environment.node()} {os.path.abspath(folder)}")


def check_new(folder: Path) -> None:
    """Raise a UserError if an earlier start of this job had a checkpoint in `folder`.

    It is on a disk that the nodes do not share, or has been removed.
    """
    if before := _saved().get(os.path.abspath(folder)):
        raise UserError(
            f"--output-dir {folder}: this job has saved there on {before}, but there is no "
            f"checkpoint on {environment.node()}: use a folder that all nodes share, or submit a "
            "new job to start over"
        )


def _saved() -> dict[str, str]:
    """Return on which node each folder got its first checkpoint."""
    with contextlib.suppress(OSError, KeyError):
        lines = Path(os.environ[SAVED_LIST]).read_text().splitlines()
        return {folder: node for node, folder in (line.split(" ", 1) for line in lines)}
    return {}


def _append(variable: str, line: str) -> None:
    with contextlib.suppress(OSError, KeyError), open(os.environ[variable], "a") as file:
        file.write(f"{line}\n")
