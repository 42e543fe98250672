"""How the ranks and their launcher agree: to start, to stop, to fail; and where all ranks are.

    launch.sh -> launch.py: checks its environment, starts the ranks, passes signals on to them
    rank: handlers.install_handlers: it ends with its launcher; then it imports torch
          failures.one_line_errors: starts its one thread, "watch"; errors come out of here
          distributed.rendezvous: takes a device, meets the others at the store
          stopping.on_signals: from here on a signal no longer ends it but stops all
    every POLL_SECONDS the thread looks, in this order, for
          the debugger or the launcher that has gone (F5) -> exits at once
          ERROR: the first rank that fails leaves it -> the others exit silently with its status
          a collective of GPUs that takes --dist-timeout -> ERROR
          ASKED: a rank asks where all are, for itself or a person -> this one leaves its ANSWER
          a loader worker that has died, unless the main thread reports it -> ERROR, as it would
          a main thread without progress -> asks; who has asked prints one block
          a signal -> writes STOP; STOP -> this rank's STEP; all go on to the latest step,
          save, and exit with STOPPED
    no store -> the rank that held it has died: exits. The launcher ends who is left, exits with
          the status of the first failure, or starts all again (MAX_RESTARTS) unless it is FINAL

This module imports neither torch nor debugpy.
"""

import signal

# Exit statuses
MISTAKE = 2  # the user's; another start would end in the same way
STOPPED = 75  # stopped by a signal and saved; EX_TEMPFAIL ("try again") of sysexits.h

# Signals
# Windows lacks SIGUSR1 and SIGHUP, and has SIGBREAK: Ctrl-Break, or the window is closed.
STOP_NAMES = {"SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGBREAK"}
STOP_SIGNALS = {signum for signum in signal.Signals if signum.name in STOP_NAMES}
KILL = getattr(signal, "SIGKILL", 9)  # Windows has no SIGKILL: any number kills there
# the exit statuses of what a signal has ended on Windows: raised, or from the console
OF_SIGNALS = (3, 0xC000013A)

# After these, another start would be pointless.
FINAL = {0, MISTAKE, STOPPED, 128 + getattr(signal, "SIGQUIT", 3)}  # SIGQUIT: Ctrl-\\
FINAL |= {128 + signum for signum in STOP_SIGNALS}

# Seconds. 2 POLL < ANSWER, and ANSWER + END < GRACE_TORCHRUN, and GRACE + ANSWER + END
# < STOP: a rank that does not answer is named, waited for, and given up before the
# launcher kills all.
POLL_SECONDS = 0.5  # between two looks of the thread
DUPLICATE_SECONDS = 1  # a signal often comes twice: from the terminal and from torchrun
ANSWER_SECONDS = 5  # for the other ranks to answer; who has not is named
# for the launcher to end a rank, for others to see a failure, for code at the end
END_SECONDS = 5
# for a rank to answer a STOP, where torchrun kills all after 30
GRACE_TORCHRUN_SECONDS = 24
GRACE_SECONDS = 100  # the same under our launcher, which kills them after
STOP_SECONDS = 120
# for torch's watchdog of GPUs to come after our end at --dist-timeout
LATE_SECONDS = 60
# then a line names what is waited for; for ranks to end after a failure
NOTICE_SECONDS = 30

# Keys in the group's store: what is there (who writes it; who reads it)
STOP = "stop"  # the name of the signal (the rank that got one; all)
STEP = "stop/{}"  # the step in which a rank saw STOP (that rank; all)
# "<rank> <exit status> <process id> <node>" (the first rank that fails; all)
ERROR = "error"
# the n-th question where all are: who asks, and for which value (that rank; all)
ASKED = "where/{}"
ANSWER = "where/{}/{}"  # the n-th answer of a rank (that rank; who asks)
# "<node> <process_space()> <process id>" (that rank; who has to name it)
PROCESS = "process/{}"
# where the debugger of a rank takes more (that rank; others of its node)
DEBUGGED = "debugged/{}"
ARRIVED = "arrived/{}"  # how many ranks are at a point with a name (each; the last)
ALL_ARRIVED = "arrived/{}/all"  # all are (the last; all)

# Environment variables of this project's own, besides those that people type
# one for each start of launch.sh; restarts (MAX_RESTARTS) keep it
LAUNCH_ID = "DDP_LAUNCH_ID"
LAUNCHER = "DDP_LAUNCHER"  # the process id of launch.sh, which becomes ddpkit/launch.py
STORE = "DDP_STORE"  # the file of the store, if all ranks are on one node
# a folder that slurm/train.sbatch keeps: where it has saved, what is a mistake
JOB = "DDP_JOB"
# with F5: the process id of torchrun, or nothing
DEBUGGED_LAUNCHER = "DDP_DEBUGGED_LAUNCHER"
THREADS = "DDP_THREADS"  # launch.sh has set OMP_NUM_THREADS, nobody else

# A file in the project: a person asks all ranks that a debugger holds to continue.
CONTINUE = "runs/.continue"

# Files in the output folder
QUESTION = ".where"  # a person asks where all ranks are
BEGUN = ".begun"  # the LAUNCH_ID of the last launch that trained there
