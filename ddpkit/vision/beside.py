"""What lies beside training, such as logs, a tracker and drawings: it never ends a run."""

from collections.abc import Callable
from typing import TypeVar

from ddpkit.errors import reason_of
from ddpkit.ranks import distributed

T = TypeVar("T")


class Beside:
    """Runs functions of a report; what they raise is a line, once for each `failed`."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(
        self, failed: str, function: Callable[..., T], *args: object, **named: object
    ) -> T | None:
        """Return what `function` does, None if it raises. failed: what is then to be said."""
        try:
            return function(*args, **named)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {reason_of(error, 200)}"
            if failed not in self.said:
                distributed.print0(f"{failed} ({reason}): the run continues without it")
            self.said.add(failed)
            return None
