"""Ports for what tests start."""

import contextlib
import random
import socket


def free_port(count: int = 1) -> int:
    """The first of `count` free ports in a row.

    They lie below those that Linux gives to outgoing connections, as one of another test could
    take such a port before it is listened at.
    """
    for _ in range(1000):
        port = random.randrange(20_000, 32_768 - count)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for offset in range(count):
                probe = probes.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port + offset))
            return port
    raise AssertionError("no port is free")
