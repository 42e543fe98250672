"""argparse for a program that runs in several ranks: errors are printed once, help has defaults.

Nothing here imports torch, so that a mistake in a flag is told at once.
"""

import argparse
import math
import os
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from engine.errors import UserError

overrides: dict[str, object] = {}  # replace the defaults of all flags: those of a run to replay


@dataclass
class Launch:
    """How this rank was started: flags that Parser takes for itself."""

    local_rank: int | None = None
    dist_timeout: float = 600.0  # seconds
    debug_rank: Sequence[int] = field(default_factory=list)
    debug_port: tuple[str, int] = ("127.0.0.1", 5678)


launch = Launch()


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Adds "(default: X)" to each flag that has one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=118)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, []) and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


class Parser(argparse.ArgumentParser):
    """An argument parser for a script that runs on several ranks.

    A mistake raises a UserError, one line; help is printed by the first rank of a node alone. A
    `@FILE` among the arguments stands for the flags in that file, several in a line if you like,
    with # comments. -1,5 is a value, not a flag.

    It has the flags of the launcher and the debugger, --local-rank, --dist-timeout, --debug-rank
    and --debug-port, which `setup` reads; they are not in what `parse_args` returns.

        parser = engine.Parser(description="Train a network.")
        parser.add_argument("--epochs", type=engine.at_least(1), default=30)
        args = parser.parse_args()
    """

    def __init__(self, **options: Any) -> None:
        common = {"formatter_class": Help, "fromfile_prefix_chars": "@", "allow_abbrev": False}
        super().__init__(**{**common, **options})
        self._negative_number_matcher = re.compile(r"-\.?\d")  # also of -1000,3000: no flag

    def add_launch_arguments(self) -> None:
        """Add the flags of the launcher and the debugger, after those of the script."""
        add, own = self.add_argument_group("ranks").add_argument, Launch()
        add("--dist-timeout", metavar="SECONDS", type=at_least(1, float), default=own.dist_timeout,
            help="how long a rank waits for the others; a week while debugging")  # fmt: skip
        add("--debug-rank", metavar="R[,R...]", type=ranks, default=[],
            help="ranks that wait for a debugger, rank R at --debug-port + R")  # fmt: skip
        add("--debug-port", metavar="[HOST:]PORT", type=address, default="127.0.0.1:5678",
            help="for the debugger of rank 0; loopback unless HOST is given")  # fmt: skip
        add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)

    def parse(
        self, argv: Sequence[str] | None = None, defaults: Mapping[str, object] | None = None
    ) -> argparse.Namespace:
        """Return the flags of `argv`, sys.argv by default; `defaults` replace those of the flags.

        defaults: by name, such as the "args" of a checkpoint; text is converted to the flag's type.
        """
        if "--dist-timeout" not in self._option_string_actions:
            self.add_launch_arguments()
        self.set_defaults(**{**(defaults or {}), **overrides})
        for action in self._actions:
            action.required = action.required and action.dest not in (defaults or {})
        args = self.parse_args(argv)
        for name in vars(launch):
            setattr(launch, name, vars(args).pop(name))
        return args

    @staticmethod
    def class_weights(text: str) -> str | tuple[float, ...]:
        """Convert auto, or A,B,... to numbers of at least 0, of which one is not 0."""
        if text == "auto":
            return text
        try:
            values = tuple(map(float, re.sub(r"[()\s]", "", text).strip(",").split(",")))
        except ValueError:
            values = (math.nan,)
        if not all(map(math.isfinite, values)) or min(values) < 0 or not any(values):
            raise ArgumentTypeError(f"{text}: expected auto, or numbers of 0 or more, not all 0")
        return values

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the flags)")

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        # A # begins a comment where a word would begin, but not within quotes: those are open then.
        for end in [*(match.start() for match in re.finditer(r"(?<!\S)#", line)), len(line)]:
            try:
                return shlex.split(line[:end])
            except ValueError as error:  # a quote that is not closed
                fault = error
        self.error(f"@FILE, line {line!r}: {fault}")


def at_least(
    low: float, kind: type[int] | type[float] = int, below: float = math.inf
) -> Callable[[str], float]:
    """Return an argparse type: a finite number of `low` or more, and less than `below`.

    kind: int or float.

        add("--dropout", type=engine.at_least(0, float, below=1), default=0.1)
    """

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            name = "an integer" if kind is int else "a number"
            raise ArgumentTypeError(f"{text} is not {name} of {low} or more")
        if value >= below:
            raise ArgumentTypeError(f"{text} is not less than {below:g}")
        return value

    return number


def ranks(text: str) -> list[int]:
    """Convert R[,R...]."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise ArgumentTypeError(f"{text} is not a rank or a list of ranks, such as 0,3")
    return sorted({int(part) for part in text.split(",")})


def address(text: str) -> tuple[str, int]:
    """Convert [HOST:]PORT; the host defaults to loopback."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ArgumentTypeError(f"{text} is not PORT or HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]") or "127.0.0.1", int(port)
