"""On a signal all ranks stop after the same step; and a rank that hangs prints where it is.

protocol.py says how the ranks agree. A step needs no collective for it, nor a read from the device.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch.distributed as dist

from ddpkit.errors import print_line
from ddpkit.ranks import (
    distributed,
    ending,
    explaining,
    failures,
    process,
    protocol,
    watch,
)
from ddpkit.ranks.protocol import ANSWER_SECONDS, STEP, STOP, STOP_SIGNALS, STOPPED


class Stopped(Exception):
    """Raised on all ranks after the same step, to stop the training."""


class Stopper:
    """The duty within `on_signals`, and what the thread and the main thread share for it."""

    def __init__(self) -> None:
        self.store = distributed.store()
        self.first_signal = 0.0  # when it came
        self.status = 1  # with which to exit if nothing can be saved
        self.grace = protocol.GRACE_SECONDS
        if process.by_plain_torchrun():
            self.grace = protocol.GRACE_TORCHRUN_SECONDS
        limit = distributed.timeout()  # after which a collective fails
        self.hang_seconds = min(0.8 * limit, max(0.5 * limit, limit - 4))
        self.last_heartbeat = -1
        self.seen = 0.0  # when that heartbeat was
        self.questions = 0  # that this rank had answered then
        # Written by the main thread:
        self.heartbeat = 0
        self.step = 1  # that it is in, counted from the start of the block
        self.is_stopping = False  # it has reached the last step, and saves
        self.kept = ""  # where a save is, since which no step has ended
        # Written by the other thread:
        self.lock = threading.Lock()  # held while it answers, and while `step` changes
        self.answered = 0.0  # when this rank, asked to stop, answered with its step
        self.is_said = False  # for whom it waits
        self.agreed = threading.Event()  # set once all have answered
        self.last_step = 0  # the latest of their answers

    def __call__(self) -> None:
        try:
            self.check_hang()
            for signum in watch.thread.signals:
                if signum in STOP_SIGNALS:
                    self.request_stop(signum)
            if self.answered:
                self.follow_stop()
            elif not self.is_stopping and self.store.check([STOP]):
                self.answer_stop()
        except dist.DistError:
            # The store has gone, with the rank or launcher that held it.
            # A launcher that ends sends a signal.
            for signum in watch.thread.wait_for_signals(ANSWER_SECONDS):
                if signum in STOP_SIGNALS:
                    process.exit_now(128 + signum)
            # As the main thread does unless it hangs; or it is past the block, and no
            # other rank is needed any more.
            if _stopper is self and not process.End.is_leaving:
                ending.report_and_exit(failures.lost_store(), self.status)

    def request_stop(self, signum: int) -> None:
        now = time.monotonic()
        if not self.first_signal:
            self.first_signal = now
            self.status = 128 + signum
            if not self.is_stopping:
                self.store.set(STOP, signal.Signals(signum).name)
            return
        # Plain torchrun passes a second Ctrl-C on as SIGTERM.
        is_interrupt = signum == signal.SIGINT or process.by_plain_torchrun()
        was_interrupt = self.status == 128 + signal.SIGINT
        is_new = now > self.first_signal + protocol.DUPLICATE_SECONDS
        if was_interrupt and is_interrupt and is_new and process.is_script():
            distributed.print0("aborted; progress since the last checkpoint is lost")
            process.exit_now(self.status)

    def answer_stop(self) -> None:
        with self.lock:
            self.store.set(STEP.format(distributed.rank()), str(self.step))
            self.answered = time.monotonic()
        self.status = 128 + signal.Signals[self.store.get(STOP).decode()]
        distributed.print0("stop requested: finishing this step, then saving")

    def follow_stop(self) -> None:
        """Wait for all to answer, and then for the main thread to leave."""
        waited = time.monotonic() - self.answered
        if waited > self.grace and self.kept:  # it does something long, after all steps
            distributed.print0(
                f"stopped {self.grace:g} s after the signal, past the last step of an epoch; saved "
                f"at {self.kept}; run the same command again to resume"
            )
            process.exit_now(STOPPED)
        if self.is_stopping or self.agreed.is_set():
            return
        answers = [STEP.format(rank) for rank in range(distributed.world_size())]
        if self.store.check(answers):
            self.last_step = max(map(int, self.store.multi_get(answers)))
            self.agreed.set()
        elif waited > ANSWER_SECONDS:
            missing = [
                rank for rank, key in enumerate(answers) if not self.store.check([key])
            ]
            states = ", ".join(distributed.states(missing))
            if waited > self.grace or "has ended" in states:
                line = f"not saved: no answer for {waited:.0f} s: {states}"
                ending.report_and_exit(line, self.status)
            if not self.is_said:
                self.is_said = True
                line = f"waiting up to {self.grace:g} s for an answer: {states}"
                print_line(line, sys.stderr)

    def check_hang(self) -> None:
        """Print where all ranks are, if the main thread has had no heartbeat for too long."""
        now = time.monotonic()
        if self.heartbeat != self.last_heartbeat:
            self.last_heartbeat = self.heartbeat
            self.seen = now
            self.questions = explaining.Asking.answered
            return
        is_shown = (
            explaining.Asking.answered > self.questions
        )  # by this rank or another
        if now - self.seen > self.hang_seconds and not is_shown:
            left = distributed.timeout() - self.hang_seconds
            seconds = min(0.6 * left, ANSWER_SECONDS)
            line = f"no progress for {self.hang_seconds:g} s:"
            explaining.show(line, seconds, is_hang=True)


_stopper: Stopper | None = None  # within `on_signals`
in_step = False  # whether the main thread is in the body of a loop over steps


@contextlib.contextmanager
def on_signals(position: Callable[[], str]) -> Iterator[None]:
    """Within the block a signal makes `end_step` raise Stopped; a rank without progress is shown.

    With a debugger at some rank neither holds: signals end the run, and ranks may be paused.
    """
    global _stopper
    if distributed.any_debugged():
        yield
        return
    stopper = _stopper = Stopper()
    explaining.Asking.position = position
    watch.thread.add_duty(failures.follow_others)
    watch.thread.add_duty(stopper)
    # The socket before the handlers: a signal that comes between them ends the process,
    # as before; the other way round it would be lost.
    taken_from = signal.set_wakeup_fd(
        watch.thread.wakeup.fileno(), warn_on_full_buffer=False
    )
    before = {}
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup ignores one
            before[signum] = signal.signal(signum, watch.hand_over)
    is_done = False
    try:
        yield
        is_done = True
    finally:
        # In reverse; first the main thread, which then no longer waits for the other one.
        _stopper = None
        if is_done:
            explaining.Asking.position = str  # what follows is in no epoch
        watch.thread.remove_duty(stopper)
        signal.set_wakeup_fd(taken_from)
        is_last = is_done and process.is_script()
        for signum, handler in before.items():
            signal.signal(signum, _exit_soon if is_last else handler)


def _exit_soon(*_: object) -> None:
    """After the training: exit unless what follows it ends by itself in a few seconds."""
    deadline = time.monotonic() + protocol.END_SECONDS

    def exit_late() -> None:
        if time.monotonic() > deadline:
            process.exit_now(STOPPED)

    watch.thread.add_duty(exit_late)


def end_step() -> None:
    """Mark the end of a training step; raise Stopped if all ranks stop after this one."""
    if not _stopper:
        return
    _stopper.heartbeat += 1
    with _stopper.lock:
        if not _stopper.answered:
            _stopper.step += 1
            return
    # This rank has said in which step it is: the others may be ahead, and it catches up.
    _stopper.agreed.wait()
    if _stopper.step >= _stopper.last_step:
        _stopper.is_stopping = True
        raise Stopped
    _stopper.step += 1


def note_kept(position: str) -> None:
    """Note where all has been saved that what follows the steps will do once more; "": nowhere."""
    if _stopper:
        _stopper.kept = position


def stop_requested() -> bool:
    """Return whether this rank knows of a stop request; other ranks may not know it yet.

    In a step it does not tell, also if that evaluates: the stop comes at the step's end.
    """
    if _stopper:
        _stopper.heartbeat += 1
    return bool(_stopper and _stopper.answered and not in_step)


def agree() -> None:
    """Raise Stopped on all ranks if one of them knows of a stop request; all have to call this."""
    if _stopper and any(distributed.gather_objects(stop_requested())):
        _stopper.is_stopping = True
        raise Stopped


def exit_stopped(how: str) -> NoReturn:
    """Exit with STOPPED, once all ranks have come here and the checkpoint is written.

    In a notebook raise KeyboardInterrupt if it is one that stops: its process remains.
    """
    store = distributed.store()
    name = store.get(STOP).decode()
    # When the first rank exits, torchrun ends the others.
    distributed.wait_for_all()
    is_interrupt = name == "SIGINT" and not process.is_script()
    if not is_interrupt:
        process.ignore_signals()
    distributed.print0(f"{name}: stopped {how}".rstrip())
    if not is_interrupt:
        process.exit_now(STOPPED)
    # A cell that trains next is not to stop for this.
    for key in STOP, STEP.format(distributed.rank()):
        store.delete_key(key)
    raise KeyboardInterrupt
