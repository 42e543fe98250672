"""On a signal all ranks stop after the same step; and a rank that hangs prints where it is.

Duties of the rank's thread; protocol.py says how the ranks agree. A step needs no collective and no
read from the device for it.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from engine.errors import print_error
from engine.ranks import distributed, failures, process, protocol
from engine.ranks.process import watch
from engine.ranks.protocol import ANSWER_SECONDS, STEP, STOP, STOP_SIGNALS, STOPPED


class Stopped(Exception):
    """Raised on all ranks after the same step, to stop the training."""


class Stopper:
    """The duty within `on_signals`, and what the thread and the main thread share for it."""

    def __init__(self) -> None:
        self.store = distributed.store()
        self.before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        self.is_broken = False  # nobody does this duty
        self.first_signal = 0.0  # when it came
        self.status = 1  # with which to exit if nothing can be saved
        by_torchrun = process.by_plain_torchrun()
        self.grace = protocol.GRACE_TORCHRUN_SECONDS if by_torchrun else protocol.GRACE_SECONDS
        limit = distributed.timeout()  # after which a collective fails
        self.hang_seconds = min(0.8 * limit, max(0.5 * limit, limit - 4))
        self.last_heartbeat = (-1, 0.0)  # its number, and when it was seen
        # Written by the main thread:
        self.heartbeat = 0
        self.step = 1  # that it is in, counted from the start of the block
        self.is_stopping = False  # it has reached the last step, and saves
        # Written by the other thread:
        self.lock = threading.Lock()  # held while it answers, and while `step` changes
        self.answered = 0.0  # when this rank, asked to stop, answered with its step
        self.last_step = 0  # the latest of the ranks' answers,
        self.agreed = threading.Event()  # once all have answered

    def __call__(self, signals: list[int]) -> None:
        try:
            self.check_hang()
            for signum in signals:
                if signum in STOP_SIGNALS:
                    self.on_signal(signum)
            if self.answered and not self.is_stopping:
                self.await_answers()
            elif not self.is_stopping and self.store.check([STOP]):
                self.answer()
        except dist.DistError:
            self.end_without_store()

    def on_error(self, error: Exception) -> None:
        self.is_broken = True
        line = f"signals no longer stop and save this run ({type(error).__name__}: {error})"
        if self.answered:  # the others wait for this rank's last step
            failures.report(line, self.status)
        print_error(line)
        if self.first_signal:  # on_main has left it to this duty
            os.kill(os.getpid(), self.status - 128)

    def on_main(self, signum: int, _: object) -> None:
        """Leave a signal to the thread, which gets it from the socket; else do as before."""
        if self.is_broken:
            signal.signal(signum, self.before[signum])
            signal.raise_signal(signum)

    def end_without_store(self) -> None:
        """End this rank: the store has gone, with the rank or launcher that held it.

        The main thread notices that, too, unless it hangs. A launcher that ends sends a signal,
        which may come later.
        """
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not watch.is_leaving:
            for signum in watch.wait():
                if signum in STOP_SIGNALS:
                    process.exit_now(128 + signum)
        if not watch.is_leaving:
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
        is_new = now > self.first_signal + protocol.DUPLICATE_SECONDS
        if was_interrupt and is_interrupt and is_new:
            distributed.say("aborted; progress since the last checkpoint is lost")
            process.exit_now(self.status)

    def answer(self) -> None:
        with self.lock:
            self.store.set(STEP.format(distributed.rank()), str(self.step))
            self.answered = time.monotonic()
        self.status = 128 + signal.Signals[self.store.get(STOP).decode()]
        if sys.stderr.isatty():
            with contextlib.suppress(OSError):  # a closed terminal
                print(file=sys.stderr)  # below the progress bar
        distributed.say("stop requested: finishing this step, then saving")

    def await_answers(self) -> None:
        answers = [STEP.format(rank) for rank in range(distributed.world_size())]
        if not self.agreed.is_set() and self.store.check(answers):
            self.last_step = max(map(int, self.store.multi_get(answers)))
            self.agreed.set()
        # Once all have answered, there is only a long step or a save to wait for.
        limit = distributed.timeout() if self.agreed.is_set() else self.grace
        waited = time.monotonic() - self.answered
        if waited <= (limit if self.agreed.is_set() else ANSWER_SECONDS):
            return
        from engine.ranks import explaining

        missing = [rank for rank, key in enumerate(answers) if not self.store.check([key])]
        what = f"{explaining.name(missing)} to answer" if missing else "this step or save"
        if waited <= limit and not any("ended" in explaining.state_of(rank) for rank in missing):
            return explaining.show(f"waiting up to {limit:g} s for {what}:", ANSWER_SECONDS)  # once
        line = f"timed out after {min(waited, limit):.0f} s waiting for {what}"
        explaining.show(f"{line}:", ANSWER_SECONDS)
        failures.report(f"{line}: not saved", self.status)

    def check_hang(self) -> None:
        """Print where all ranks are, once, if the main thread has had no heartbeat for too long."""
        now, (last, seen) = time.monotonic(), self.last_heartbeat
        if self.heartbeat != last:
            self.last_heartbeat = (self.heartbeat, now)
        elif now - seen > self.hang_seconds:
            self.last_heartbeat = (last, math.inf)
            from engine.ranks import explaining

            seconds = min(0.6 * (distributed.timeout() - self.hang_seconds), ANSWER_SECONDS)
            explaining.show(f"no progress for {self.hang_seconds:g} s:", seconds)


_stopper: Stopper | None = None  # within `on_signals`


@contextlib.contextmanager
def on_signals(position: Callable[[], str]) -> Iterator[None]:
    """Within the block a signal makes `end_step` raise Stopped; a second Ctrl-C ends at once.

    If a rank makes no progress for 80 % of --dist-timeout, it prints its stack and `position()`.
    With a debugger at some rank none of this holds: signals end the run, and ranks may be paused.
    """
    global _stopper
    if distributed.is_debugged():
        yield
        return
    stopper = _stopper = Stopper()
    watch.position = position
    failures.follow_others()
    watch.add(stopper, stopper.on_error)
    taken_from = watch.take_signals()
    handled = [each for each in stopper.before if stopper.before[each] != signal.SIG_IGN]  # nohup
    for signum in handled:
        signal.signal(signum, stopper.on_main)  # without a handler the socket gets nothing
    is_done = False
    try:
        yield
        is_done = True
    except Exception as error:
        watch.error = error  # another rank may ask meanwhile
        watch.remove(stopper)
        if stopper.answered:  # if a rank has ended without an answer, say that
            stopper.await_answers()
        raise
    finally:
        _stopper = None
        if is_done:
            watch.position = str  # what follows is in no epoch
        watch.remove(stopper)
        signal.set_wakeup_fd(taken_from)
        for signum in handled:
            signal.signal(signum, _exit_soon if is_done else stopper.before[signum])


def _exit_soon(*_: object) -> None:
    """After the training: exit unless what follows it ends by itself in a few seconds."""
    deadline = time.monotonic() + protocol.END_SECONDS
    watch.add(lambda _: time.monotonic() > deadline and process.exit_now(STOPPED), print_error)


def end_step() -> None:
    """Mark the end of a training step; raise Stopped if all ranks stop after this one."""
    if not _stopper:
        return
    _stopper.heartbeat += 1
    with _stopper.lock:
        if not _stopper.answered:
            _stopper.step += 1
            return
    _stopper.agreed.wait()
    if _stopper.step >= _stopper.last_step:
        stop()
    _stopper.step += 1


def stop_requested() -> bool:
    """Return whether this rank knows of a stop request; other ranks may not know it yet."""
    if not _stopper:
        return False
    _stopper.heartbeat += 1
    return bool(_stopper.answered)


def agree(device: torch.device) -> None:
    """Raise Stopped on all ranks if one of them knows of a stop request; all have to call this."""
    if not _stopper:
        return
    if distributed.reduce_tensor(torch.tensor(stop_requested(), dtype=torch.int, device=device)):
        stop()


def stop() -> NoReturn:
    """Raise Stopped; all ranks have to call this."""
    if _stopper:
        _stopper.is_stopping = True
    raise Stopped


def exit_stopped(position: str) -> NoReturn:
    """Exit with STOPPED, once all ranks have come here and the checkpoint is written."""
    name = distributed.store().get(STOP).decode()
    distributed.barrier()  # when the first rank exits, torchrun ends the others
    process.ignore_signals()
    distributed.say(f"{name}: stopped and saved {position}")
    process.exit_now(STOPPED)
