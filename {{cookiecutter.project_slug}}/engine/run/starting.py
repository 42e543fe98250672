"""The first and the last line of a script that runs on several ranks."""

import contextlib
import os
import time
from collections.abc import Callable

from engine.errors import UserError, print_error
from engine.ranks import environment, process
from engine.ranks.protocol import MISTAKE

SECONDS = 5  # for the first rank of the node to print what all have found


def prepare(parse_args: Callable[[], object] | None = None) -> None:
    """Have this process end quietly on Ctrl-C, and with its launcher; then check the flags.

    Call it before torch is imported, which takes seconds: a wrong flag, or --help, ends the ranks
    with status 2 or 0 before that.

        if __name__ == "__main__":
            engine.prepare(parse_args)
    """
    process.install_handlers()
    if parse_args is None or process.is_debugged():  # `start` lets the debugger show the error
        return
    try:
        parse_args()
    except UserError as error:
        with contextlib.suppress(UserError):
            environment.adopt()  # srun and mpirun say otherwise which rank it is
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(error)
        else:
            time.sleep(SECONDS)  # the launcher ends this rank
        process.exit_now(MISTAKE)


def start(main: Callable[[], object]) -> None:
    """Call `main` and leave the group of ranks; if it raises, end all ranks.

    A UserError, and errors whose cause is known, are printed by one rank as one line, with status 2
    or 1; others with their traceback.

        if __name__ == "__main__":
            engine.start(main)
    """
    from engine.data import loading
    from engine.ranks import distributed, failures, remedies
    from engine.run import sizes

    with failures.one_line_errors(loading.explain, remedies.explain, sizes.explain):
        main()
        if distributed.is_joined():
            distributed.teardown()
