"""A debugger holds this process: all ranks end with it, and it names the rank where it stops.

This module does not import debugpy.
"""

import contextlib
import importlib.util
import math
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

from ddpkit.errors import UserError
from ddpkit.ranks import process, protocol, watch
from ddpkit.ranks.protocol import DEBUGGED_LAUNCHER, KILL

# threads of torch and others; pydevd shows none of its own
OF_LIBRARIES = "QueueFeederThread", "(_pin_memory_loop)", "tqdm_monitor"


def find() -> None:
    """Have debugpy be importable: the installed one, or that of VS Code's extension."""
    if importlib.util.find_spec("debugpy"):
        return
    bundled = os.environ.get("BUNDLED_DEBUGPY_PATH")  # in VS Code's terminals
    if bundled:
        sys.path.append(os.path.dirname(bundled))
        return
    # VS Code's extension begins with the first Python file, and only new terminals know it
    raise UserError(
        "--debug: no debugpy: python -m pip install debugpy (in VS Code open main.py, then a new "
        "terminal)"
    )


def follow() -> None:
    """End all ranks with this one's debugger (VS Code's Stop means one process) or on Ctrl-C."""
    adapt()
    # By it exit_now ends the launcher, and workers know that they are debugged.
    os.environ[DEBUGGED_LAUNCHER] = str(os.getppid()) if process.by_torchrun() else ""
    sys.breakpointhook = stop
    # What completion in the debug console has torch say
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is", FutureWarning)
    threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}"
    # The second comes from the kernel once a launcher ends.
    ends = {signal.SIGINT, signal.SIGTERM}
    for signum in ends:
        signal.signal(signum, watch.hand_over)
    rank = os.getpid()
    parent = os.getppid()
    # A worker to which nobody can attach any more ends, too.
    if sys.platform == "linux":
        os.register_at_fork(after_in_child=lambda: process.end_with(KILL, rank))

    def duty() -> None:
        is_left = not process.is_debugged() or os.getppid() != parent
        is_over = is_left or ends & {*watch.thread.signals}
        # Once the main thread has ended, pydevd ends as the program does.
        if is_over and threading.main_thread().is_alive():
            process.exit_now(128 + signal.SIGINT)

    watch.thread.add_duty(duty)
    signal.set_wakeup_fd(watch.thread.wakeup.fileno(), warn_on_full_buffer=False)


def show_tensor(tensor: object) -> str:
    """Return what the debugger shows of a tensor: shape, type and range come first."""
    from ddpkit.ranks import values  # which imports torch

    return f"{values.describe(tensor)}: {tensor!r}"


def adapt() -> None:
    """Have the debugger name the rank where it stops, go over ddpkit, and continue when asked.

    VS Code cuts off which process a row is of; beside it stands the description of the stop. What
    the terminal shows is not shown again, with bars in red, in the debug console.
    """
    tensors = SimpleNamespace(  # a "str provider" of pydevd's
        can_provide=lambda kind, _: hasattr(kind, "grad_fn"),
        get_str=show_tensor,
    )
    with contextlib.suppress(AttributeError, KeyError):  # its own names may change
        api = sys.modules["_pydevd_bundle.pydevd_extension_api"]
        extensions = sys.modules["_pydevd_bundle.pydevd_extension_utils"]
        schema = sys.modules["_pydevd_bundle._debug_adapter.pydevd_schema"]
        filtering = sys.modules["_pydevd_bundle.pydevd_filtering"]
        lifecycle = sys.modules["_pydevd_bundle.pydevd_thread_lifecycle"]
        redirection = sys.modules["_pydevd_bundle.pydevd_io"]
        resume = lifecycle.resume_threads
        debugger = sys.modules["pydevd"].get_global_debugger()
        over_ddpkit = [filtering.ExcludeFilter("ddpkit", True, is_path=False)]
        describe = schema.StoppedEventBody.__init__
        request = process.project() / protocol.CONTINUE
        asked_at = math.inf
        for stream in ("stdout", "stderr"):
            redirection.stop_redirect_stream_to_pydb_io_messages(stream)

        def describe_with_name(
            body: object, reason: str, description: str | None = None, **rest: object
        ) -> None:
            hide_threads()
            name = threading.main_thread().name  # in a worker another one
            describe(body, reason, f"{name}: {description or reason}", **rest)

        def follow_person() -> None:
            nonlocal asked_at
            hide_threads()
            # unless justMyCode is false, or launch.json has rules of its own
            has_rules = debugger.get_require_module_for_filters()
            if debugger.get_use_libraries_filter() and not has_rules:
                debugger.set_exclude_filters(over_ddpkit)
            before = asked_at
            asked_at = _time_of(request)
            if asked_at > before:
                resume("*")

        follow_person()
        extensions.extensions_of_type(api.StrPresentationProvider).insert(0, tensors)
        schema.StoppedEventBody.__init__ = describe_with_name
        watch.thread.add_duty(follow_person)


def hide_threads() -> None:
    """Leave out of the view what would push the rank or the worker that is held out of it."""
    for thread in threading.enumerate():
        if thread.name.endswith(OF_LIBRARIES):
            setattr(thread, "is_pydev_daemon_thread", True)  # noqa: B010


def _time_of(path: Path) -> float:
    """Return when a file was last written; 0 if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def stop() -> None:
    """Stop in the calling frame; debugpy's own hook does not in a process that torchrun started."""
    if process.is_debugged():
        sys.modules["pydevd"].settrace(
            trace_only_current_thread=True, stop_at_frame=sys._getframe(1)
        )
