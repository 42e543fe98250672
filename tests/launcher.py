"""launch.sh and its ranks in forks of this process, which has imported torch.

`ddpkit.launch.main()` runs as it is; where it starts a Python for a rank, a fork becomes one: with
the session, the signal handlers, the environment and the exit handlers that a new process has.
"""

import atexit
import functools
import multiprocessing.util
import os
import runpy
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import ranks
from generated import LIVE, Command, Done, children, left, texts
from ranks import Patch

from ddpkit import launch
from ddpkit.ranks import protocol


class Fork:
    """In place of subprocess.Popen([python, "-u", SCRIPT, *FLAGS], env, start_new_session=True)."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: Path,
        patch: Patch,
        env: dict[str, str],
        **_: bool,
    ) -> None:
        self.returncode: int | None = None
        script = command[2]
        here = Path.cwd()

        def act() -> None:
            os.chdir(here)
            os.setsid()
            as_new(before)
            os.environ.clear()
            os.environ.update(env)
            patch()
            run_script(script, command[3:])

        # A signal that comes between the fork and `as_new` waits, as it would for exec.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, protocol.STOP_SIGNALS)
        self.pid = ranks.fork(act, output, Path(script).parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with open(f"{output}.pids", "a") as file:
            file.write(f"{env['RANK']} {self.pid}\n")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def as_new(mask: set[signal.Signals] | None = None) -> None:
    """Forget what a fork has inherited and a new process would not have."""
    for signum in protocol.STOP_SIGNALS:
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    tempfile.tempdir = None  # TMPDIR may be another
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def run_script(script: str, words: Sequence[str]) -> None:
    """Run a script and what Python does when one ends."""
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


class Launch:
    """A launcher with its ranks, in forks."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[object],
        output: Path,
        patch: Patch,
        ignored: Sequence[signal.Signals] = (),  # signals, as SIGHUP under nohup
        **env: str,
    ) -> None:
        self.output = output
        here = Path.cwd()

        def act() -> None:
            os.chdir(here)
            os.setsid()
            as_new()
            for signum in ignored:
                signal.signal(signum, signal.SIG_IGN)
            os.environ.update(env)
            start = functools.partial(Fork, output=output, patch=patch)
            launch.subprocess = SimpleNamespace(Popen=start)
            sys.argv = texts(["launch.sh", words])
            sys.exit(launch.main())

        self.pid = ranks.fork(act, output, folder)
        LIVE.add(self.pid)

    def ranks(self) -> list[int]:
        """The process ids of its living ranks, in their order."""
        path = Path(f"{self.output}.pids")
        lines = path.read_text().splitlines() if path.exists() else []
        started = dict(line.split() for line in lines)  # of each rank the last one
        pids = [int(started[rank]) for rank in sorted(started)]
        there = children()
        return [pid for pid in pids if pid in there]

    def kill(self, signum: int, *which: int) -> None:
        """Send a signal to these ranks, or else to the launcher itself."""
        for pid in [self.ranks()[rank] for rank in which] or [self.pid]:
            os.kill(pid, signum)

    def end(self, seconds: float = 120) -> Done:
        """Wait for it, and for ranks that it has left, if it was killed."""
        statuses = ranks.wait([self.pid], seconds)
        LIVE.discard(self.pid)
        there = left(60)
        out, err = ranks.said(self.output)
        return Done(statuses, out, err, there)


class RealLaunch:
    """launch.sh in processes of its own, with the words of Launch."""

    def __init__(self, folder: Path, words: Sequence[object], **env: str) -> None:
        self.command = Command([folder / "launch.sh", words], **env)
        self.pid = self.command.process.pid

    def ranks(self) -> list[int]:
        found = self.command.ranks()
        return [found[rank] for rank in sorted(found)]

    def end(self, seconds: float = 120) -> Done:
        return self.command.end(seconds)
