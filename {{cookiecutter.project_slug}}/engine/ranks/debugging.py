"""--debug-rank: a rank that waits for a debugger, on any node and under any launcher."""

import os
import socket
import sys
import threading
from argparse import ArgumentTypeError
from collections.abc import Sequence

from engine.errors import UserError
from engine.ranks import distributed, process


def ranks(text: str) -> list[int]:
    """Parse R[,R...], for argparse."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise ArgumentTypeError(f"{text} is not a rank, nor ranks with commas between them")
    return sorted({int(part) for part in text.split(",")})


def address(text: str) -> tuple[str, int]:
    """Parse [HOST:]PORT, for argparse; loopback unless a host is named."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ArgumentTypeError(f"{text} is not a port from 1 to 65535, nor HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def wait_for_debugger(ranks: Sequence[int], address: tuple[str, int]) -> None:
    """Wait for a debugger at port + rank, if this rank is one of `ranks`; the others go on.

    They wait at the next collective. Detaching lets the rank run on; it can be attached to again.
    """
    if ranks and ranks[-1] >= distributed.world_size():
        size = distributed.world_size()
        raise UserError(f"--debug-rank {ranks[-1]}: ranks go from 0 to {size - 1}")
    if distributed.rank() not in ranks:
        return
    if process.is_debugged():
        raise UserError("--debug-rank: this rank has a debugger already; start it without F5")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning, about nothing here
    try:
        import debugpy
    except ImportError:
        raise UserError("--debug-rank needs debugpy: python -m pip install debugpy") from None
    rank, (host, port) = distributed.rank(), address
    port += rank
    try:
        debugpy.listen((host, port))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {rank} cannot listen at {host}:{port} ({error}): choose another --debug-port"
        ) from None
    threading.current_thread().name = f"rank {rank}"
    node = socket.gethostname()
    tunnel = f". From elsewhere first: ssh -L {port}:{host}:{port} {node}"
    where, more = (host, tunnel) if host.startswith("127.") else (node, "")
    line = f'rank {rank} waits on {node}. VS Code, "Attach to a rank": host {where}, port {port}'
    print(line + more, file=sys.stderr, flush=True)
    debugpy.wait_for_client()
