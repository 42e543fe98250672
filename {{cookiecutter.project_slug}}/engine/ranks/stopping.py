"""On a signal all ranks stop after the same step; and a rank that hangs prints where it is.

A watcher thread in each rank does both, because Python's signal handlers do not run while the main
thread waits in a collective; protocol.py says how the ranks agree. A step needs no collective and
no read from the device for it.
"""

import contextlib
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from engine.errors import print_error
from engine.ranks import distributed, explaining, failures, logs, positions, process
from engine.ranks.protocol import DUPLICATE_SECONDS, STOP, STOP_SIGNALS, STOPPED, answer

POLL_SECONDS = 0.5
ANSWER_SECONDS = 10  # after which the ranks that have not answered are named
GRACE_SECONDS = 25 if process.by_plain_torchrun() else 100  # for these; killed after 30, 120
AFTER_SECONDS = 5  # for what follows the training, when a signal comes after the last save


class Stopped(Exception):
    """Raised on all ranks after the same step, to stop the training."""


class Watcher(threading.Thread):
    """The thread that watches a rank's main thread, and what the two share."""

    def __init__(self) -> None:
        super().__init__(name="stopping", daemon=True)
        self.store = distributed.store()
        self.before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        self.signal_socket, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        self.is_broken = False  # this thread has died
        self.first_signal = 0.0  # when it came
        self.status = 1  # with which to exit if nothing can be saved
        limit = distributed.timeout()  # after which a collective fails
        self.hang_seconds = min(0.8 * limit, max(0.5 * limit, limit - 4))
        self.last_heartbeat = (-1, 0.0)  # its number, and when it was seen
        # Written by the main thread:
        self.heartbeat = 0
        self.step = 1  # that it is in, counted from the start of the block
        self.is_stopping = False  # it has reached the last step, and saves
        self.is_over = threading.Event()  # nothing is left to watch
        # Written by this thread:
        self.lock = threading.Lock()  # held while it answers, and while `step` changes
        self.answered = 0.0  # when this rank, asked to stop, answered with its step
        self.last_step = 0  # the latest of the ranks' answers,
        self.agreed = threading.Event()  # once all have answered

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                signals = self.wait(POLL_SECONDS)
                self.check_hang()
                for signum in signals:
                    self.on_signal(signum)
                self.poll()
        except dist.DistError:
            self.end_without_store()
        except Exception as error:
            self.is_broken = True
            line = f"signals no longer stop and save this run ({type(error).__name__}: {error})"
            if self.answered:  # the others wait for this rank's last step
                failures.report(line, self.status)
            print_error(line)

    def wait(self, seconds: float) -> list[int]:
        """Return the stop signals that come within so many seconds; at once if one comes."""
        self.signal_socket.settimeout(seconds)  # by poll: select refuses numbers above 1023
        try:
            return [signum for signum in self.signal_socket.recv(64) if signum in STOP_SIGNALS]
        except TimeoutError:
            return []

    def on_main(self, signum: int, _: object) -> None:
        """Leave a signal to this thread, which gets it from the socket; else do as before."""
        if self.is_broken:
            signal.signal(signum, self.before[signum])
            signal.raise_signal(signum)

    def end_without_store(self) -> None:
        """End this rank: the store has gone, with the rank or launcher that held it.

        The main thread notices that, too, unless it hangs. A launcher that ends sends a signal,
        which may come later.
        """
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.first_signal and time.monotonic() < deadline and not self.is_over.is_set():
            for signum in self.wait(POLL_SECONDS):
                self.first_signal, self.status = time.monotonic(), 128 + signum
        if self.is_over.is_set():
            return
        if self.first_signal:
            process.exit_now(self.status)
        failures.report(failures.lost_store(), self.status)

    def on_signal(self, signum: int) -> None:
        now = time.monotonic()
        if not self.first_signal:
            self.first_signal, self.status = now, 128 + signum
            if not self.is_stopping:
                self.store.set(STOP, signal.Signals(signum).name)
            return
        # Plain torchrun passes a second Ctrl-C on as SIGTERM.
        is_interrupt = signum == signal.SIGINT or process.by_plain_torchrun()
        was_interrupt = self.status == 128 + signal.SIGINT
        if was_interrupt and is_interrupt and now > self.first_signal + DUPLICATE_SECONDS:
            process.drop_unread()
            distributed.say("aborted; progress since the last checkpoint is lost")
            process.exit_now(self.status)

    def poll(self) -> None:
        """Look into the store: has a rank failed, is there a stop request, have all answered?"""
        if (status := failures.status_of_failure()) is not None:  # which nccl does not notice
            self.is_over.wait(1)  # let that rank print its error first
            process.exit_now(status)
        if self.is_stopping:
            return
        if self.answered:
            self.await_answers()
        elif self.store.check([STOP]):
            with self.lock:
                self.store.set(answer(distributed.rank()), str(self.step))
                self.answered = time.monotonic()
            self.status = 128 + signal.Signals[self.store.get(STOP).decode()]
            process.drop_unread()
            if logs.has_terminal():
                with contextlib.suppress(OSError):  # a closed terminal
                    print(file=sys.stderr)  # below the progress bar
            distributed.say("stop requested: finishing this step, then saving")

    def await_answers(self) -> None:
        answers = [answer(rank) for rank in range(distributed.world_size())]
        if not self.agreed.is_set() and self.store.check(answers):
            self.last_step = max(map(int, self.store.multi_get(answers)))
            self.agreed.set()
        # Once all have answered, there is only a long step or a save to wait for.
        limit = distributed.timeout() if self.agreed.is_set() else GRACE_SECONDS
        waited = time.monotonic() - self.answered
        if waited <= (limit if self.agreed.is_set() else ANSWER_SECONDS):
            return
        missing = [rank for rank, key in enumerate(answers) if not self.store.check([key])]
        what = f"{explaining.name(missing)} to answer" if missing else "this step or save"
        if waited <= limit and not any("ended" in positions.state_of(rank) for rank in missing):
            return explaining.show(f"waiting up to {limit:g} s for {what}:", is_end=False)  # once
        line = f"timed out after {min(waited, limit):.0f} s waiting for {what}"
        process.drop_unread()
        explaining.show(f"{line}:")
        failures.report(f"{line}: not saved", self.status)

    def check_hang(self) -> None:
        """Print where all ranks are, once, if the main thread has had no heartbeat for too long."""
        now, (last, seen) = time.monotonic(), self.last_heartbeat
        if self.heartbeat != last:
            self.last_heartbeat = (self.heartbeat, now)
        elif now - seen > self.hang_seconds:
            self.last_heartbeat = (last, math.inf)
            left = distributed.timeout() - self.hang_seconds
            seconds = min(0.6 * left, positions.ANSWER_SECONDS)
            explaining.show(f"no progress for {self.hang_seconds:g} s:", seconds, is_end=False)


_watcher: Watcher | None = None  # within `on_signals`


@contextlib.contextmanager
def on_signals(where: Callable[[], str]) -> Iterator[None]:
    """Within the block a signal makes `end_step` raise Stopped; a second Ctrl-C ends at once.

    If a rank makes no progress for 80 % of --dist-timeout, it prints its stack and `where()`.
    With a debugger at some rank none of this holds: signals end the run, and ranks may be paused.
    """
    global _watcher
    if distributed.is_debugged():
        yield
        return
    watcher = _watcher = Watcher()
    positions.mine.where, positions.mine.thread = where, threading.get_ident()
    is_main = threading.current_thread() is threading.main_thread()  # not in Ray's worker
    before = watcher.before if is_main else {}
    handled = [signum for signum in before if before[signum] != signal.SIG_IGN]  # by nohup
    if is_main:
        signal.set_wakeup_fd(watcher.wakeup.fileno(), warn_on_full_buffer=False)
    for signum in handled:
        signal.signal(signum, watcher.on_main)  # without a handler the socket gets nothing
    watcher.start()
    is_done = False
    try:
        yield
        is_done = True
    except Exception as error:
        positions.mine.error = error  # another rank may ask meanwhile
        raise
    finally:
        _watcher = None
        if is_done:
            positions.mine.where = str  # what follows is in no epoch
        watcher.is_over.set()
        watcher.wakeup.send(b"\0")
        watcher.join(ANSWER_SECONDS)  # it waits for the store, which a stopped rank may hold
        if is_main:
            signal.set_wakeup_fd(-1)
        for signum in handled:
            signal.signal(signum, _exit_soon if is_done else before[signum])


def _exit_soon(*_: object) -> None:
    """After the training: exit unless what follows it ends by itself in a few seconds."""
    timer = threading.Timer(AFTER_SECONDS, process.exit_now, [STOPPED])
    timer.daemon = True
    timer.start()


def end_step() -> None:
    """Mark the end of a training step; raise Stopped if all ranks stop after this one."""
    if not _watcher:
        return
    _watcher.heartbeat += 1
    with _watcher.lock:
        if not _watcher.answered:
            _watcher.step += 1
            return
    _watcher.agreed.wait()
    if _watcher.step >= _watcher.last_step:
        stop()
    _watcher.step += 1


def stop_requested() -> bool:
    """Return whether this rank knows of a stop request; other ranks may not know it yet."""
    if not _watcher:
        return False
    _watcher.heartbeat += 1
    return bool(_watcher.answered)


def agree(device: torch.device) -> None:
    """Raise Stopped on all ranks if one of them knows of a stop request; all have to call this."""
    if not _watcher:
        return
    if distributed.reduce_tensor(torch.tensor(stop_requested(), dtype=torch.int, device=device)):
        stop()


def stop() -> NoReturn:
    """Raise Stopped; all ranks have to call this."""
    if _watcher:
        _watcher.is_stopping = True
    raise Stopped


def exit_stopped(where: str) -> NoReturn:
    """Exit with STOPPED, once all ranks have come here and the checkpoint is written."""
    name = distributed.store().get(STOP).decode()
    distributed.barrier()  # when the first rank exits, torchrun ends the others
    process.ignore_signals()
    distributed.say(f"{name}: stopped and saved {where}")
    process.exit_now(STOPPED)
