"""Ports for what tests start."""

import collections
import contextlib
import random
import socket

_marks: collections.deque[socket.socket] = collections.deque(maxlen=100)


def free_port(count: int = 1) -> int:
    """The first of `count` free ports in a row, which other tests do not get meanwhile.

    A store listens there seconds later: two groups of ranks with one port would meet each other.
    The ports lie below those that Linux gives to outgoing connections.
    """
    for _ in range(1000):
        port = random.SystemRandom().randrange(20_000, 32_768 - count)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            marks = [
                probes.enter_context(socket.socket(socket.AF_UNIX))
                for _ in range(count)
            ]
            for number, mark in enumerate(marks, port):
                # no file; it ends with this process
                mark.bind(f"\0ddp-template port {number}")
                probes.enter_context(socket.socket()).bind(("127.0.0.1", number))
            _marks.extend(mark.dup() for mark in marks)
            return port
    raise AssertionError("no port is free")
