"""The first and the last line of a script."""

import contextlib
import os
import time
from collections.abc import Callable

from ddpkit.errors import UserError, print_error
from ddpkit.ranks import environment, process
from ddpkit.ranks.protocol import END_SECONDS, MISTAKE


def prepare(parse_args: Callable[[], object] | None = None) -> None:
    """Have this process end quietly on Ctrl-C, and with its launcher; then check the flags.

    Call it before torch is imported, which takes seconds.

        if __name__ == "__main__":
            ddpkit.prepare(parse_args)
    """
    process.install_handlers()
    try:
        if parse_args and not process.is_debugged():  # `start` lets the debugger show the error
            parse_args()
    except UserError as error:
        with contextlib.suppress(UserError):
            environment.adopt()  # srun says otherwise which rank it is
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(error)
        else:
            time.sleep(END_SECONDS)  # the launcher ends this rank
        environment.note_mistake()
        process.exit_now(MISTAKE)


def start(main: Callable[[], object]) -> None:
    """Call `main` and leave the group of ranks; if it raises, end all ranks.

    A UserError, or an error whose cause is known, is printed as one line.

        if __name__ == "__main__":
            ddpkit.start(main)
    """
    from ddpkit.data import loading
    from ddpkit.ranks import distributed, failures

    with failures.one_line_errors(loading.explain):
        main()
        if distributed.is_joined():
            distributed.teardown()
