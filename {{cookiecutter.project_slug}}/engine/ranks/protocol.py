"""How the ranks, their watcher threads and the launcher agree to stop or to fail.

To stop: a rank that gets a signal writes the signal's name under STOP in the process group's store.
The watcher thread of each rank polls the store and answers with the step that its main thread is
in. All ranks continue to the latest of these steps, save, and exit with STOPPED.

To fail: the first rank that fails writes "<rank> <exit status> <process id> <node>" under ERROR,
and alone prints the error. The others find it there when their collectives break, or by polling,
and exit silently with the same status. The launcher exits with it, or starts all ranks again
(MAX_RESTARTS) unless the status is one of FINAL.

To find out where all ranks are: the first rank that wants to know writes its number (PERSON if
somebody asks it) under explain(1), and next time under explain(2). Each rank that sees this writes
where it is under explain(1, RANK). The first rank prints what follows from that, and writes
explained(1).

This module imports neither torch nor debugpy.
"""

import signal

# Exit statuses
MISTAKE = 2  # the user's; another start would end in the same way
STOPPED = 75  # stopped by a signal and saved; EX_TEMPFAIL ("try again") of sysexits.h

# Signals
STOP_SIGNALS = {  # Windows lacks the last two
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
}
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL
DUPLICATE_SECONDS = 1  # a signal often comes twice: from the terminal and from torchrun

# After these, another start would be pointless.
FINAL = {0, MISTAKE, STOPPED, 128 + getattr(signal, "SIGQUIT", 3)}  # SIGQUIT: Ctrl-\\
FINAL |= {128 + signum for signum in STOP_SIGNALS}

# Keys in the process group's store
STOP = "stop"  # the name of the signal
PERSON = "person"  # who asks where all ranks are, if no rank does: where.py
ERROR = "error"  # "<rank> <exit status> <process id> <node>" of the first rank that failed
SEEN = "error/seen"  # how many ranks know of ERROR: rank 0, which holds the store, waits for them

# Environment variables of this project's own
LAUNCH_ID = "LAUNCH_ID"  # one for each start of launch.sh; restarts (MAX_RESTARTS) keep it
LAUNCHER_PID = "LAUNCHER_PID"  # the process id of launch.sh, which becomes engine/ranks/launcher.py
DEBUGGED_LAUNCHER = "DEBUGGED_LAUNCHER"  # with F5: the process id of torchrun, or nothing
THREADS = "DDP_THREADS"  # launch.sh has set OMP_NUM_THREADS, nobody else

# Files in the output folder
ASKED = ".where"  # with "-" and a random name: where.py asks
ATTACH = ".attach"  # with "-" and a rank: that is to listen for a debugger
BEGUN = ".begun"  # the LAUNCH_ID of the last launch that trained there


def answer(rank: int) -> str:
    """Return the store's key for the step that `rank` was in when it saw STOP."""
    return f"{STOP}/{rank}"


def explain(turn: int, rank: int | None = None) -> str:
    """Return the key for the `turn`-th question where all ranks are, or for a rank's answer."""
    return f"explain/{turn}" if rank is None else f"explain/{turn}/{rank}"


def explained(turn: int) -> str:
    """Return the key that says that all answers have been read."""
    return f"explain/{turn}/done"


def listens(rank: int) -> str:
    """Return the key for how a debugger attaches to `rank`, or why it cannot."""
    return f"listens/{rank}"


def process_of(rank: int) -> str:
    """Return the key for "<node> <process id>" of `rank`."""
    return f"process/{rank}"
