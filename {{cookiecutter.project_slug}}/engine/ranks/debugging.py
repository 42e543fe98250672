"""--debug-rank: a rank that waits for a debugger, on any node and under any launcher.

And under F5 or --debug-rank an error is held where it was raised, before it becomes one line.
"""

import functools
import os
import socket
import sys
import threading
from collections.abc import Sequence

from engine.errors import UserError
from engine.ranks import distributed, process

_address = "127.0.0.1", 5678  # --debug-port, for rank 0


def wait_for_debugger(ranks: Sequence[int], address: tuple[str, int]) -> None:
    """If this rank is one of `ranks`, wait for a debugger at port + rank.

    They say so in the order of their numbers, so that all wait once the last has said it. The other
    ranks wait at the next collective. After detaching, the rank runs on, and a debugger can be
    attached again.
    """
    global _address
    _address = address
    rank, size = distributed.rank(), distributed.world_size()
    if ranks and ranks[-1] >= size:
        raise UserError(f"--debug-rank {ranks[-1]}: ranks go from 0 to {size - 1}")
    if ranks:
        sys.breakpointhook = process.stop_in_debugger  # in the others breakpoint() does nothing
    if rank not in ranks:
        return
    where = listen()
    before = [waiting(other) for other in ranks if other < rank]
    if before:
        distributed.store().wait(before)
    print(f"rank {rank} waits on {where}", file=sys.stderr, flush=True)
    distributed.store().set(waiting(rank), "")
    import debugpy

    debugpy.wait_for_client()


@functools.cache
def listen() -> str:
    """Let a debugger attach to this rank, at --debug-port + rank, from now on; return how."""
    rank, node = distributed.rank(), socket.gethostname()
    host, port = _address[0], _address[1] + rank
    if process.is_debugged():
        raise UserError("--debug-rank: this rank already has a debugger; start it without F5")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning that is not needed
    try:
        import debugpy
    except ImportError:
        raise UserError("--debug-rank needs debugpy: python -m pip install debugpy") from None
    try:
        debugpy.listen((host, port))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {rank} cannot listen at {host}:{port} ({error}): choose another --debug-port"
        ) from None
    threading.main_thread().name = f"rank {rank}"
    is_local = host.startswith("127.")
    line = f'{node}. VS Code, "Attach to a rank": host {host if is_local else node}, port {port}'
    if is_local:
        line += f". From another machine, first run: ssh -L {port}:{host}:{port} {node}"
    return line


def waiting(rank: int) -> str:
    """Return the store's key for "`rank` waits for a debugger"."""
    return f"debug/{rank}"


def hold(error: Exception) -> None:
    """If there is a debugger that stops at uncaught errors, stop where `error` was raised."""
    # A debugger has imported it; the function is there from debugpy 1.8.22 on.
    stop = getattr(sys.modules.get("debugpy"), "trigger_exception_handler", None)
    if stop:
        stop(error)
