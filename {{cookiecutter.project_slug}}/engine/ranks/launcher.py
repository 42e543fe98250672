"""torchrun with a better end: its last line is a rank's own error, its status that of the rank.

It takes a script and its flags. MAX_RESTARTS says how often all ranks are started again, to resume
from the last checkpoint; torchrun's own --max-restarts would also repeat a mistake of the user's.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from engine.errors import UserError, no_torch, print_error
from engine.ranks import environment, logs, process, protocol, requeue

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.be_quiet()
    try:
        logs.check()
        if line := no_torch():
            raise UserError(line)
        nodes, restarts = environment.prepare()
    except UserError as error:
        print_error(error)
        requeue.note_failure(protocol.MISTAKE)
        sys.exit(protocol.MISTAKE)

import atexit
import contextlib
import logging
import os
import signal
import tempfile
import time
import uuid

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

from engine.ranks.agreeing import Agreement, meet
from engine.ranks.environment import Nodes

STOP_SECONDS = 120  # for the ranks to stop and save


class Signals:
    """Passes signals on to the ranks; torchrun would exit at the second, before they have saved."""

    def __init__(self) -> None:
        self.first, self.first_at = 0, 0.0  # the signal that came first, and when
        self.sent: set[int] = set()
        self.ignored = {s for s in protocol.STOP_SIGNALS if signal.getsignal(s) == signal.SIG_IGN}
        self.start_ranks = PContext.start
        self.ranks: PContext | None = None  # while they run
        self.is_alone = False  # the ranks of another node have failed, so these had to be ended
        self.logs = logs.Logs()
        if hasattr(os, "killpg"):  # not on Windows
            PContext.start = lambda ranks: self.start(ranks)  # type: ignore[assignment, method-assign]

    def start(self, ranks: PContext) -> None:
        """Start the ranks, then replace the handlers that torchrun has installed by then."""
        with self.logs.starting(ranks):
            self.start_ranks(ranks)
        self.ranks = ranks
        signal.signal(signal.SIGALRM, self.kill)
        for signum in protocol.STOP_SIGNALS:
            is_ignored = signum in self.ignored  # by nohup
            signal.signal(signum, signal.SIG_IGN if is_ignored else self.on_signal)

    def on_signal(self, signum: int, _: object) -> None:
        now = time.monotonic()
        is_duplicate = now < self.first_at + protocol.DUPLICATE_SECONDS
        if not self.first:
            self.first, self.first_at = signum, now
            signal.alarm(STOP_SECONDS)
        elif signum == self.first == signal.SIGINT and not is_duplicate:
            signal.alarm(5)  # a rank that is held does not exit by itself
        self.send(signum)

    def send(self, signum: int) -> None:
        self.sent.add(signum)
        for pid in self.ranks.pids().values() if self.ranks else ():
            for each in (signum, signal.SIGCONT):  # wake a rank that SIGSTOP holds
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                    os.killpg(pid, each)

    def end_ranks(self, reason: str) -> None:
        """End the ranks because of what has happened on another node."""
        if self.ranks and not self.first:
            self.is_alone, self.first_at = True, time.monotonic()
            print_error(f"{reason}: ending the ranks of this node")
            signal.alarm(STOP_SECONDS)
            self.send(signal.SIGTERM)

    def kill(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        name = signal.Signals(self.first or signal.SIGTERM).name
        seconds = time.monotonic() - self.first_at
        process.drop_unread()
        print_error(f"the ranks had not ended {seconds:.0f} s after {name} and were killed")


def print_failed(failure: ProcessFailure) -> None:
    """Print which rank has failed, unless it is one of this node, which has printed its error."""
    if failure.error_file_data.get("timestamp"):  # failures.py has left a note in the file
        if not failure.message.endswith(f" on {environment.node()}"):
            or_victim = " or lost another" if failure.exitcode == 1 else ""
            print_error(f"{failure.message} has failed{or_victim}")
    elif failure.exitcode not in protocol.FINAL:
        print_error("a rank has failed, here or on another node")


def launch(nodes: Nodes, agreement: Agreement | None, signals: Signals) -> int:
    """Run torchrun once; return the exit status."""
    folder = tempfile.TemporaryDirectory(prefix="ddp-", ignore_cleanup_errors=True)
    # A file, which only its owner can open: torch's store in the network takes orders from whoever
    # reaches it, and unpickles them. The address: even if this host's name does not resolve.
    where = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
    where += [f"--rdzv-endpoint={folder.name}/launcher", f"--log-dir={folder.name}"]
    watching: contextlib.AbstractContextManager = contextlib.nullcontext()
    if agreement:
        where, watching = agreement.flags(), agreement.watching(signals.end_ranks)
    script, *words = sys.argv[1:]
    if words[:1] == ["-m"]:  # and a module, in place of main.py
        script, *words = words
    if "--check" in words:
        script = str(Path(script).with_name("preflight.py"))
    try:
        with folder, watching, contextlib.closing(signals.logs):
            main([*where, "--nproc-per-node", str(nodes.ranks), script, *words])
    except ChildFailedError as error:
        rank, failure = root_cause(error)
        status = failure.exitcode
        if status >= 0:
            if nodes.count > 1:
                print_failed(failure)
            return status
        if -status in signals.sent:
            return 128 + signals.first
        # A process that a signal ends prints nothing itself.
        requeue.note_failure(128 - status)
        name = signal.Signals(-status).name
        hint = ": out of memory?" if name == "SIGKILL" else ""
        place = f" on {environment.node()}" if nodes.count > 1 else ""
        print_error(f"rank {rank} (process {failure.pid}){place} was ended by {name}{hint}")
        return 128 - status
    except SignalException as error:
        return 128 + error.sigval
    except dist.DistError as error:  # the launchers of several nodes have lost each other
        print_error(str(error).splitlines()[0])
        return 1
    return 0


def root_cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return (rank, failure) of the rank that made the others fail.

    That is one that crashed, even if another rank noticed it and exited first; but not one that
    torchrun killed 30 seconds later, because it had not exited.
    """
    rank, first = error.get_first_failure()
    if first.exitcode == protocol.MISTAKE:
        return rank, first  # nccl aborts the ranks that it leaves behind
    for other, failure in error.failures.items():
        is_soon = failure.timestamp < first.timestamp + 10
        if is_soon and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return other, failure
    return rank, first


def restart(nodes: Nodes, restarts: int) -> None:
    """Replace this process by a new launcher, with `restarts` left."""
    print(f"restarting; MAX_RESTARTS is {restarts} now", file=sys.stderr, flush=True)
    os.environ["MAX_RESTARTS"] = str(restarts)
    environment.export_nodes(nodes)
    os.execv(sys.executable, sys.orig_argv)


def run(nodes: Nodes, restarts: int) -> int:
    logging.disable(logging.ERROR)
    # Rank 0 holds the ranks' store, not this process: the store survives if this one is killed.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[protocol.LAUNCHER_PID] = str(os.getpid())
    atexit.register(process.ignore_signals)  # the status is known by then
    agreement, launch_id = None, uuid.uuid4().hex
    if nodes.count > 1:
        try:
            agreement = meet(nodes, restarts)
        except UserError as error:
            print_error(error)
            return protocol.MISTAKE
        restarts, launch_id = agreement.restarts, agreement.launch_id
        os.environ.pop(protocol.LAUNCH_ID, None)
    os.environ.setdefault(protocol.LAUNCH_ID, launch_id)
    signals = Signals()
    status = launch(nodes, agreement, signals)
    if signals.is_alone:
        status = 1  # of which a restart may help
    elif agreement and status not in (0, protocol.STOPPED):
        agreement.tell_failure(status)
    if restarts and agreement:
        over = agreement.settle(status, *([5] if signals.first else []))
        if over and status not in protocol.FINAL:
            print_error(f"not restarting: {over}")
        restarts = 0 if over else restarts
    if status not in protocol.FINAL and restarts and not signals.first:
        restart(nodes, restarts - 1)
    return status


if __name__ == "__main__":
    sys.exit(run(nodes, restarts))
