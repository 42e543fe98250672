"""torchrun, but for its end: a rank's own error is the last thing shown, and its status counts.

Takes torchrun's arguments. MAX_RESTARTS says how often the ranks are started again, to go on from
the last checkpoint: not after a user's mistake or a signal, which would end them in the same way.
torchrun's own --max-restarts knows no such difference.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from engine import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.be_quiet()

import logging
import os
import signal
import tempfile
import uuid

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

# Statuses with which there is no point in another start: what was asked for has come about.
FINAL = {0, process.MISTAKE, process.STOPPED, *(128 + signum for signum in process.STOP_SIGNALS)}


def launch(stopped: Path) -> int:
    """Run torchrun once; return the status. `stopped` is what ranks make when they have stopped."""
    os.environ[process.STOPPED_MARK] = str(stopped)
    try:
        main()
    except ChildFailedError as error:
        rank, failure = root_cause(error)
        if failure.exitcode >= 0:
            if "--nnodes" in sys.argv and failure.exitcode not in FINAL:
                print("error: a rank has failed, here or on another node", file=sys.stderr)
            return failure.exitcode
        # Nobody else can tell of it: a process that a signal ends prints nothing.
        name = signal.Signals(-failure.exitcode).name
        hint = ": out of memory?" if name == "SIGKILL" else ""
        line = f"error: rank {rank} (process {failure.pid}) was ended by {name}{hint}"
        print(line, file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return process.STOPPED if stopped.exists() else 128 + error.sigval
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
    if first.exitcode == process.MISTAKE:
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
    os.environ.setdefault(process.LAUNCH_ID, uuid.uuid4().hex)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # seconds, for a long save
    if hasattr(signal, "SIGUSR1"):  # torchrun would die of it
        signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup
            os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    with tempfile.TemporaryDirectory() as folder:
        status = launch(Path(folder, "stopped"))
    restarts = int(os.environ.get("MAX_RESTARTS", 0))
    if status not in FINAL and restarts:
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
