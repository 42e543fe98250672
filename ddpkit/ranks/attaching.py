"""A debugger joins ranks that wait for it: one session, whatever their number."""

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpkit.errors import UserError, print_line
from ddpkit.ranks import debugger, distributed, environment, process, protocol

HOST = "127.0.0.1"


def wait_for_debugger(ranks: Sequence[int], port: int) -> None:
    """If this rank is one of `ranks`, of which -1 stands for all, wait for a debugger.

    The first of them on each node listens, at port + its number. The others join its session, as
    if they were its children. A run in a terminal of VS Code is attached to without a choice, and
    ends with its debugger.
    """
    if not ranks:
        return
    size = distributed.world_size()
    if ranks[0] < 0:
        ranks = range(size)
    if ranks[-1] >= size:
        raise UserError(f"--debug {ranks[-1]}: ranks go from 0 to {size - 1}")
    # In ranks without a debugger breakpoint() then does nothing.
    sys.breakpointhook = debugger.stop
    rank = distributed.rank()
    if rank not in ranks or process.is_debugged():
        return
    import debugpy.server.api  # `find` has found it as the flag was read

    threading.main_thread().name = f"rank {rank}"
    store = distributed.store()
    here = [number for number in ranks if number in distributed.ranks_of_node()]
    key = protocol.DEBUGGED.format(here[0])
    endpoint = Path(os.environ.get("VSCODE_DEBUGPY_ADAPTER_ENDPOINTS", ""))
    # It looks at its own machine only.
    is_local = not environment.has_other_nodes()
    by_editor = bool(endpoint.name) and endpoint.parent.is_dir() and is_local
    if rank == here[0]:
        port += rank
        try:
            debugpy.listen((HOST, port))
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"--debug: cannot listen with debugpy at {HOST}:{port} ({error}): use "
                "another port, R:PORT"
            ) from None
        who = f"rank {', '.join(map(str, here))} on {environment.node()}"
        print_line(
            f"{who} waits for a debugger: host {HOST}, port {port} (if VS Code does not attach "
            'by itself: "Attach to all ranks")',
            sys.stderr,
        )
        with announced(endpoint, port) if by_editor else contextlib.nullcontext():
            debugpy.wait_for_client()
        # By which those that it starts, such as loader workers, join its session
        setup = sys.modules["pydevd"].SetupHolder.setup
        session = {
            "host": setup["client"],
            "port": setup["port"],
            "access_token": setup["access-token"],
            "ppid": os.getpid(),
        }
        store.set(key, json.dumps(session))
    else:
        distributed.await_keys([key], math.inf)
        sys.modules["pydevd"].settrace(
            **json.loads(store.get(key)),
            protocol="dap",
            patch_multiprocessing=True,
            suspend=False,
        )
    if by_editor:
        debugger.follow()
    else:
        debugger.adapt()


@contextlib.contextmanager
def announced(endpoint: Path, port: int) -> Iterator[None]:
    """Within the block have the file at which VS Code's extension looks name this port."""
    if endpoint.exists():
        # Another window's, which is about to be attached to, or a left-over
        time.sleep(1)
        endpoint.unlink(missing_ok=True)
        time.sleep(1)  # sooner it may look like a change, and only what is new counts
    new = endpoint.with_suffix(".new")
    new.write_text(json.dumps({"client": {"host": HOST, "port": port}}), "utf-8")
    try:
        new.replace(endpoint)
        yield
    finally:
        endpoint.unlink(missing_ok=True)
