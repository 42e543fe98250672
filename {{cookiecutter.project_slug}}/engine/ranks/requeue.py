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
FAILED_LIST = "FAILED_LIST"  # nodes on which something has failed, the first one first


def blame(node: str | None = None) -> None:
    """Tell the batch script that something has failed on `node`, by default on this one."""
    if node is None:
        node = environment.node()
    _append(FAILED_LIST, node)


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
