"""The one thread beside the main one; it does its duties every POLL_SECONDS, or at a signal.

Signals reach it by a socket: handlers do not run while the main thread is in a collective.
"""

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable

from ddpkit.errors import print_line
from ddpkit.ranks import process, protocol
from ddpkit.ranks.protocol import KILL

Duty = Callable[[], object]


class Watch(threading.Thread):
    pydev_do_not_trace = True  # it runs while the debugger holds the others

    def __init__(self) -> None:
        super().__init__(name="watch", daemon=True)
        self.duties: list[Duty] = []
        self.signals: list[int] = []  # that have come since the last look
        self.lock = threading.Lock()  # held while it does them
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self.signals = self.wait_for_signals(protocol.POLL_SECONDS)
            with self.lock:
                try:
                    for duty in self.duties.copy():
                        duty()
                except Exception:  # without it nobody could stop this rank
                    print_line(traceback.format_exc(), sys.stderr)
                    process.exit_now(1)

    def wait_for_signals(self, seconds: float) -> list[int]:
        """Return the signals that come within `seconds`; at once if one comes."""
        self.socket.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            return list(self.socket.recv(64))
        return []

    def add_duty(self, duty: Duty) -> None:
        if duty not in self.duties:
            self.duties.append(duty)
        if not self.ident:
            # Not made before: forks would share it.
            self.socket, self.wakeup = socket.socketpair()
            self.wakeup.setblocking(False)
            self.start()

    def remove_duty(self, duty: Duty) -> None:
        if self.lock.acquire(timeout=2 * protocol.ANSWER_SECONDS):
            if duty in self.duties:  # a child that was forked has none
                self.duties.remove(duty)
            self.lock.release()


thread = Watch()  # of this process: `watch.thread` is another one in a child


def end_with(signum: int, parent: int) -> None:
    """Have this process get `signum` once process `parent` has ended.

    From the kernel, if it can: then also where a hang holds Python. Else the thread looks.
    """

    def follow_parent() -> None:
        if process.is_running(parent):
            return
        thread.duties.remove(follow_parent)
        if signum == KILL:
            os.kill(os.getpid(), KILL)
        signal.raise_signal(signum)  # Windows has no other way to the handler

    if not process.end_with(signum, parent):
        thread.add_duty(follow_parent)


@atexit.register  # at once: it looks on at the exit handlers that follow
def _stop() -> None:
    if thread.ident:
        thread.is_over = True
        thread.wakeup.send(b"\0")
        thread.join(1)
        if not thread.is_alive():
            thread.socket.close()
            thread.wakeup.close()


def hand_over(*_: object) -> None:
    """Leave a signal to the thread: without any handler the socket gets nothing."""


def _begin_anew() -> None:
    """Leave the thread to the parent, in a forked child: it is not here."""
    global thread
    if thread.ident:
        signal.set_wakeup_fd(-1)
    thread = Watch()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_anew)
