"""What a rank sets up before it imports torch: it ends with its launcher."""

import atexit
import faulthandler
import functools
import os
import signal
import sys

from ddpkit.errors import guard_streams, no_torch, print_error, print_line
from ddpkit.ranks import children, debugger, process, protocol, watch


@functools.cache  # in a process once
def install_handlers() -> None:
    """Exit silently on Ctrl-C, and exit with torchrun or the debugger; print a stack on a crash."""
    # First of all, as the next file would get the number of a closed stream.
    guard_streams()
    line = no_torch()
    if line:
        print_error(line)
        sys.exit(protocol.MISTAKE)
    process.be_quiet()  # before torch is imported, which reads its variables then
    if not sys.stderr:  # it is closed
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(2)
    # Exit handlers run in reverse: signals count no longer, then the workers are killed.
    children.end_workers_at_exit()
    atexit.register(process.ignore_signals)
    if process.by_torchrun():
        watch.end_with(signal.SIGTERM, process.launcher())
    if process.is_debugged():
        debugger.follow()


@functools.cache
def say_start() -> None:
    """Print that the ranks start, once their flags are checked."""
    is_rank = protocol.LAUNCHER in os.environ or process.by_plain_torchrun()
    if is_rank and os.environ["RANK"] == "0":
        print_line(f"starting {os.environ['WORLD_SIZE']} rank(s) ...", sys.stdout)
