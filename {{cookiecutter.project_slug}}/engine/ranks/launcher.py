"""torchrun, but for its end: a rank's own error is the last thing shown, and its status counts.

Takes torchrun's arguments. MAX_RESTARTS says how often the ranks are started again, to go on from
the last checkpoint: not after a user's mistake or a signal, which would end them in the same way.
torchrun's own --max-restarts knows no such difference.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.be_quiet()

import atexit
import contextlib
import logging
import os
import signal
import time
import uuid

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

from engine.errors import UserError
from engine.ranks import environment, protocol
from engine.ranks.protocol import FINAL

LIMIT = 120  # seconds that ranks have to stop and save


class Signals:
    """Passes signals on to the ranks and waits on, for how they end.

    torchrun itself would take the second signal for an order to leave before they have saved.
    """

    def __init__(self) -> None:
        self.first = 0  # the one that came first
        self.at = 0.0  # when
        self.sent: set[int] = set()
        self.handled = {s for s in protocol.STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN}
        self.start_ranks = PContext.start
        if hasattr(os, "killpg"):  # not on Windows
            PContext.start = lambda ranks: self.start(ranks)  # type: ignore

    def start(self, ranks: PContext) -> None:
        self.start_ranks(ranks)  # which has made torchrun's own handlers, too
        self.ranks = ranks
        signal.signal(signal.SIGALRM, self.give_up)
        for signum in protocol.STOP_SIGNALS:  # the others are ignored: nohup started this
            signal.signal(signum, self.handle if signum in self.handled else signal.SIG_IGN)

    def handle(self, signum: int, _: object) -> None:
        now = time.monotonic()
        if not self.first:
            self.first, self.at = signum, now
            signal.alarm(LIMIT)
        elif signum == self.first == signal.SIGINT and now - self.at > protocol.DUPLICATE_SECONDS:
            signal.alarm(5)  # a rank that is held does not end by itself
        self.send(signum)

    def send(self, signum: int) -> None:
        self.sent.add(signum)
        for pid in self.ranks.pids().values():
            for each in (signum, signal.SIGCONT):  # one that SIGSTOP holds has to hear it, too
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                    os.killpg(pid, each)

    def give_up(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        name, seconds = signal.Signals(self.first).name, time.monotonic() - self.at
        process.drop_unread()
        print(
            f"error: the ranks had not ended {seconds:.0f} s after {name} and were killed",
            file=sys.stderr,
        )


def launch(signals: Signals) -> int:
    """Run torchrun once; return the status."""
    try:
        main()
    except ChildFailedError as error:
        rank, failure = root_cause(error)
        if failure.exitcode >= 0:
            if "--nnodes" in sys.argv and failure.exitcode not in FINAL:
                print("error: a rank has failed, here or on another node", file=sys.stderr)
            return failure.exitcode
        if -failure.exitcode in signals.sent:
            return 128 + signals.first
        # Nobody else can tell of it: a process that a signal ends prints nothing.
        name = signal.Signals(-failure.exitcode).name
        hint = ": out of memory?" if name == "SIGKILL" else ""
        line = f"error: rank {rank} (process {failure.pid}) was ended by {name}{hint}"
        print(line, file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except DistError as error:  # the launchers of several nodes have lost each other
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


def root_cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return (rank, failure) of the one that drew the others with it.

    A crash, even where another rank noticed it and was gone before; not one that torchrun had to
    kill for not ending, which takes it 30 seconds.
    """
    rank, first = error.get_first_failure()
    if first.exitcode == protocol.MISTAKE:
        return rank, first  # nccl aborts the ranks that it leaves behind
    for other, failure in error.failures.items():
        soon = failure.timestamp < first.timestamp + 10
        if soon and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return other, failure
    return rank, first


def run() -> int:
    logging.disable(logging.ERROR)
    # The ranks' store in rank 0, not here: it outlives a launcher that is killed.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault(protocol.LAUNCH_ID, uuid.uuid4().hex)
    os.environ[protocol.LAUNCHER_PID] = str(os.getpid())
    atexit.register(process.ignore_signals)  # the status is known
    if "--master-addr" in sys.argv:
        try:
            environment.wait_for_name(sys.argv[sys.argv.index("--master-addr") + 1])
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return protocol.MISTAKE
    signals = Signals()
    status = launch(signals)
    restarts = int(os.environ.get("MAX_RESTARTS", 0))
    if status not in FINAL and restarts and not signals.first:
        print(f"starting again; MAX_RESTARTS is {restarts - 1} now", file=sys.stderr, flush=True)
        os.environ["MAX_RESTARTS"] = str(restarts - 1)
        command = list(sys.orig_argv)
        if "--master-port" in command:  # another: an older launcher may still be there
            place = command.index("--master-port") + 1
            command[place] = str(int(command[place]) + 1)
        os.execv(sys.executable, command)
    return status


if __name__ == "__main__":
    sys.exit(run())
