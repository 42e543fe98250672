"""On a signal all ranks stop after the same step; and a rank that hangs tells where.

SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP ask for a stop, of any rank; torchrun passes on what it
gets. The rank tells the group's key-value store. A thread in every rank looks there twice a second
and answers with the step that its main thread is in; all go on to the latest of these and no
further, so none waits in a collective for one that has left. To a step this adds no collective
and no reading from the device. It takes a thread, because Python's signal handlers do not run
while the main thread waits in a collective.
"""

import contextlib
import faulthandler
import math
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from engine.ranks import distributed, failures, process, protocol
from engine.ranks.protocol import STOP, STOP_SIGNALS

POLL = 0.5  # seconds between two looks at the store
ANSWER = 10  # seconds that ranks have to answer: one that does not has died, or hangs


class Stopped(Exception):
    """All ranks are to stop here, after the same step."""


class Watch:
    """What a rank's main thread and the thread beside it tell each other."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.store = distributed.store()
        self.where = where
        self.signal_socket, self.wakeup = socket.socketpair()  # of signals
        self.wakeup.setblocking(False)
        self.first = 0.0  # when the first signal came
        self.status = 1
        self.lock = threading.Lock()
        self.step = 1  # the step that the main thread is in, counted from the block's beginning
        self.answered = 0.0  # when this rank, asked to stop, answered with its step
        self.last = 0  # the step to stop after
        self.agreed = threading.Event()  # on the last step
        self.arrived = False  # whether the main thread is there
        self.over = threading.Event()  # nothing is left to watch
        self.alarm = 0.8 * distributed.timeout()  # before a collective gives up
        self.heartbeat = 0  # of life, from the main thread
        self.seen = -1  # of these
        self.moved = 0.0  # when the last was seen

    def run(self) -> None:
        while not self.over.is_set():
            readable, _, _ = select.select([self.signal_socket], [], [], POLL)
            received = self.signal_socket.recv(64) if readable else b""
            self.check_hang()
            try:
                for signum in received:
                    if signum in STOP_SIGNALS:
                        self.on_signal(signum)
                self.poll()
            except RuntimeError:
                # The store has gone, with the rank or the launcher that held it. The main thread
                # sees that, too, unless it hangs.
                if self.over.wait(0 if self.first else ANSWER):
                    return
                process.exit_now(self.status)

    def on_signal(self, signum: int) -> None:
        now = time.monotonic()
        if not self.first:
            self.first, self.status = now, 128 + signum
            if not self.arrived:
                self.store.set(STOP, signal.Signals(signum).name)
            return
        # Plain torchrun passes a second Ctrl-C on as SIGTERM.
        is_interrupt = signum == signal.SIGINT or process.by_plain_torchrun()
        if (
            is_interrupt
            and self.status == 128 + signal.SIGINT
            and now > self.first + protocol.DUPLICATE_SECONDS
        ):
            process.drop_unread()
            distributed.say("aborted; progress since the last checkpoint is lost")
            process.exit_now(self.status)

    def poll(self) -> None:
        if (status := failures.status_of_failure()) is not None:  # nccl does not tell of it
            self.over.wait(1)  # what that rank has to say comes first
            process.exit_now(status)
        if self.arrived:
            return
        if self.answered:
            answers = [protocol.answer(rank) for rank in range(distributed.world_size())]
            if not self.agreed.is_set() and self.store.check(answers):
                self.last = max(int(self.store.get(key)) for key in answers)
                self.agreed.set()
            # Once all have answered, a long step or save is all there can be to wait for.
            limit = distributed.timeout() if self.agreed.is_set() else ANSWER
            if time.monotonic() - self.answered > limit:
                silent = [key[5:] for key in answers if not self.store.check([key])]
                what = f"rank {', '.join(silent)} to answer" if silent else "this step or save"
                process.drop_unread()
                failures.report(f"waited {limit:g} s for {what}: not saved", self.status)
        elif self.store.check([STOP]):
            with self.lock:  # the main thread begins no step meanwhile
                self.store.set(protocol.answer(distributed.rank()), str(self.step))
                self.answered = time.monotonic()
            self.status = 128 + signal.Signals[self.store.get(STOP).decode()]
            process.drop_unread()
            if sys.stderr.isatty():
                with contextlib.suppress(OSError):  # of a terminal that is gone
                    print(file=sys.stderr)  # below the progress bar
            distributed.say("stop requested: finishing this step, then saving")

    def check_hang(self) -> None:
        now = time.monotonic()
        if self.heartbeat != self.seen:
            self.seen, self.moved = self.heartbeat, now
            faulthandler.dump_traceback_later(self.alarm + 3 * POLL)  # if this thread is stuck, too
        elif now - self.moved > self.alarm:
            self.moved = math.inf  # once is enough
            faulthandler.cancel_dump_traceback_later()
            frame = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
            line = (
                f"rank {distributed.rank()} has finished nothing for {self.alarm:.0f} s: "
                f"{self.where()}, {distributed.collectives()} collectives begun; it is here:\n"
            )
            stack = "".join(traceback.format_stack(frame)).rstrip()
            process.drop_unread()
            print(line + stack, file=sys.stderr, flush=True)


_watch: Watch | None = None  # while there is something to stop


@contextlib.contextmanager
def on_signals(where: Callable[[], str]) -> Iterator[None]:
    """Within the block a signal makes `end_step` raise Stopped; a second Ctrl-C ends at once.

    If nothing gets on for most of --dist-timeout, each rank's stack goes to stderr, with `where()`.
    With a debugger at some rank all that is left out: signals end the run, and ranks may be held.
    """
    global _watch
    if distributed.is_debugged():
        yield
        return
    watch = _watch = Watch(where)
    before: dict[int, Any] = {}
    signal.set_wakeup_fd(watch.wakeup.fileno(), warn_on_full_buffer=False)
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup has it
            before[signum] = signal.signal(signum, lambda *_: None)
    thread = threading.Thread(target=watch.run, name="stopping", daemon=True)
    thread.start()
    after: Callable[..., None] | None = None
    try:
        yield
        after = _end_soon
    finally:
        _watch = None
        watch.over.set()
        watch.wakeup.send(b"\0")
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        signal.set_wakeup_fd(-1)
        for signum, handler in before.items():
            signal.signal(signum, handler if after is None else after)


def _end_soon(*_: object) -> None:
    """End in 5 seconds, all being saved, unless what follows the training is over by then."""
    timer = threading.Timer(5, process.exit_now, [protocol.STOPPED])
    timer.daemon = True
    timer.start()


def end_step() -> None:
    """Mark the end of a training step; raise Stopped if all ranks are to stop after this one."""
    if not _watch:
        return
    _watch.heartbeat += 1
    with _watch.lock:
        if not _watch.answered:
            _watch.step += 1
            return
    _watch.agreed.wait()
    if _watch.step >= _watch.last:
        stop()
    _watch.step += 1


def stop_requested() -> bool:
    """Whether a stop is asked for: not yet known to all ranks, so what follows has to be agreed."""
    if not _watch:
        return False
    _watch.heartbeat += 1
    return bool(_watch.answered)


def stop() -> NoReturn:
    """Raise Stopped; for all ranks alike."""
    if _watch:
        _watch.arrived = True
    raise Stopped


def exit_stopped(where: str) -> NoReturn:
    """End this rank, all having stopped and the checkpoint being written, with protocol.STOPPED."""
    name = distributed.store().get(STOP).decode()
    distributed.barrier()  # the first to end has torchrun end the others
    process.ignore_signals()
    distributed.say(f"{name}: stopped and saved {where}")
    process.exit_now(protocol.STOPPED)
