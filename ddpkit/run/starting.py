"""The first and the last line of a script."""

import contextlib
import gc
import importlib
import os
import re
import sys
import time
from collections.abc import Callable

from ddpkit import version
from ddpkit.errors import UserError, print_error
from ddpkit.ranks import environment, handlers, process
from ddpkit.ranks.protocol import END_SECONDS, MISTAKE

THRESHOLDS = gc.get_threshold()
SELDOM = 100_000  # objects, instead of hundreds


def before_imports(
    parse_args: Callable[[], object] | None = None, needs: str = ""
) -> None:
    """Have this process end quietly on Ctrl-C, and with its launcher; then check the flags.

    Call it before torch is imported, which takes seconds. Garbage is seldom collected until
    `run_main`, which makes that a tenth faster. If the flags have a `local_rank`, it also sets, for
    a process of srun's, RANK, LOCAL_RANK and the others that torchrun sets. needs: the least
    version of ddpkit, of which the first number is that for which the script is written.

        if __name__ == "__main__":
            ddpkit.before_imports(parse_args, needs="3.0")
    """
    gc.set_threshold(SELDOM)  # of new objects; the other two remain
    handlers.install_handlers()
    try:
        check_itself(needs)
        flags = parse_args and parse_args()
        if hasattr(flags, "local_rank"):  # it may be a rank, as predict.py is not
            environment.adopt()
    except UserError as error:
        with contextlib.suppress(UserError):
            environment.adopt()  # srun says otherwise which rank it is
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(error)
        else:
            time.sleep(END_SECONDS)  # the launcher ends this rank
        environment.note_mistake()
        process.exit_now(MISTAKE)
    handlers.say_start()
    if process.is_debugged():
        import_untraced()


def import_untraced() -> None:
    """Import what is large while the debugger looks away: otherwise it takes twice as long."""
    if "debugpy" not in sys.modules:  # another editor's
        return
    # not by debugpy.trace_this_thread, which raises errors within itself in a rank: a debugger
    # that stops on raised ones would hold these
    debugger = sys.modules["pydevd"].get_global_debugger()
    debugger.disable_tracing()
    for name in "torch", "torchmetrics":
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    debugger.enable_tracing()


def check_itself(needs: str) -> None:
    """Raise a UserError if this ddpkit is too old, or too new."""
    is_copy = (process.project() / "ddpkit").is_dir()
    this = f"{version.FOLDER} is ddpkit {version.__version__}, main.py"
    present = version_numbers(version.__version__)
    least = version_numbers(needs)
    if present < least:
        how = "cruft update" if is_copy else "python -m pip install -r requirements.txt"
        raise UserError(f"{this} needs {needs}: update ddpkit ({how})")
    if least and present[0] > least[0]:  # names may have gone
        raise UserError(
            f"{this} is written for {least[0]}: install ddpkit<{least[0] + 1}, or migrate main.py "
            "by the page Migration of the documentation"
        )


def version_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def run_main(main: Callable[[], object]) -> None:
    """Call `main` and leave the group of ranks; if it raises, end all ranks.

    A UserError, or an error whose cause is known, is printed as one line, others once. A
    hang of the collectives prints where each rank is. For any script, also one that does not call
    `before_imports`.

        if __name__ == "__main__":
            ddpkit.run_main(main)
    """
    from ddpkit.ranks import distributed, failures

    handlers.install_handlers()
    handlers.say_start()
    gc.set_threshold(*THRESHOLDS)
    with failures.one_line_errors():
        main()
        if distributed.is_joined():
            distributed.teardown()
