"""What lies beside training, such as logs, a tracker and drawings: it never ends a run."""

from collections.abc import Callable
from typing import TypeVar

from ddpkit.errors import reason_of
from ddpkit.ranks import distributed

T = TypeVar("T")


SAID: set[str] = set()  # which each Reporter clears


def beside(
    failed: str, function: Callable[..., T], *args: object, **named: object
) -> T | None:
    """Return what `function` does; None if it raises, which is a line, once for each `failed`.

    failed: the beginning of that line.
    """
    try:
        return function(*args, **named)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {reason_of(error, 200)}"
        if failed not in SAID:
            distributed.print0(f"{failed} ({reason}): the run continues without it")
        SAID.add(failed)
        return None
