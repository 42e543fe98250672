"""Signals as a process in the foreground has them, wherever it was started."""

import contextlib
import os
import signal

# SIGHUP, SIGQUIT: not on Windows
NAMES = ("SIGINT", "SIGQUIT", "SIGHUP")
FROM_TERMINAL = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


def restore_signals() -> None:
    """Take the signals that a shell has had ignored: `command &` in a script, or `nohup`.

    What is ignored stays so in every process started from here, and no test of a Ctrl-C could pass.
    The terminal's own do not reach this process then: it is in a session of its own.
    """
    for signum in FROM_TERMINAL:
        if signal.getsignal(signum) == signal.SIG_IGN:
            with contextlib.suppress(
                PermissionError
            ):  # the first of its session or group
                os.setsid()
            signal.signal(signum, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
