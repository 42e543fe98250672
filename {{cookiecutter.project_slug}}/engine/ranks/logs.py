"""LOG_DIR: what each rank prints goes to a file of its own, too.

The ranks write into pipes, from which a process, copying.py, copies to the launcher's output and to
the files. It goes on until the last rank has ended, however rank or launcher end.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import UserError
from engine.ranks import environment, process

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import PContext

LAST_SECONDS = 2  # for what the ranks have printed last, after their end
TERMINAL = "LOG_TERMINAL"  # in the environment: stderr leads to a terminal


def has_terminal() -> bool:
    """Return whether stderr is a terminal, or a pipe of this module that leads to one."""
    return sys.stderr.isatty() or TERMINAL in os.environ


def check() -> None:
    """Make the folder LOG_DIR, if it is set; raise a UserError if no file can be made there."""
    if folder := os.environ.get("LOG_DIR"):
        try:
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            what = f"LOG_DIR={folder}: no file can be made there ({error.strerror})"
            raise UserError(f"{what}; give another folder") from None


class Logs:
    """The files of this node's ranks, if LOG_DIR is set."""

    def __init__(self) -> None:
        self.folder = os.environ.get("LOG_DIR")
        self.copier: subprocess.Popen | None = None

    @contextlib.contextmanager
    def starting(self, ranks: "PContext") -> Iterator[None]:
        """Have the ranks that start in the block write into pipes; then copy from these."""
        if not self.folder:
            yield
            return
        if sys.stderr.isatty():
            columns, lines = os.get_terminal_size(2)  # the progress bar cannot ask a pipe
            os.environ.update({TERMINAL: "1", "COLUMNS": str(columns), "LINES": str(lines)})
        is_one = False
        with contextlib.suppress(OSError):  # one is closed
            is_one = os.path.sameopenfile(1, 2)  # then a single pipe keeps the order
        pipes: list[tuple[int, int, int, int]] = []  # rank on the node, stream, both ends
        for rank in ranks.envs:
            for stream, paths in ((1, ranks.stdouts), (2, ranks.stderrs)):
                if stream == 1 or not is_one:
                    pipes.append((rank, stream, *os.pipe()))
                paths[rank] = f"/dev/fd/{pipes[-1][-1]}"
        yield
        orders, pids = [], ranks.pids()
        for rank, stream, end, _ in pipes:
            number = ranks.envs[rank]["RANK"]
            path = os.path.join(self.folder, f"rank-{number}.log")
            orders.append((end, stream, path, _header(number, pids[rank])))
        copying = str(Path(__file__).with_name("copying.py"))
        with process.holding_signals():  # in the copier for good
            self.copier = subprocess.Popen(
                [sys.executable, copying],
                stdin=subprocess.PIPE,
                pass_fds=[end for _, _, end, _ in pipes],
                start_new_session=True,
            )
        assert self.copier.stdin
        self.copier.stdin.write(json.dumps(orders).encode())
        self.copier.stdin.close()
        for *_, end, other_end in pipes:
            os.close(end)
            os.close(other_end)
        for handler in getattr(ranks, "subprocess_handlers", {}).values():
            for opened in (handler._stdout, handler._stderr):  # torchrun would keep them open
                opened.close()

    def close(self) -> None:
        """Wait until what the ranks printed last is written, unless nobody reads it."""
        if self.copier:
            try:
                self.copier.wait(LAST_SECONDS)
            except subprocess.TimeoutExpired:
                self.copier.kill()


def _header(rank: str, pid: int) -> str:
    who = f"rank {rank} on {environment.node()}, process {pid}"
    return f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {who}: {shlex.join(sys.argv[1:])}"
