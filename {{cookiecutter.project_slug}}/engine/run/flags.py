"""argparse for a program that runs in several ranks: errors are printed once, help has defaults."""

import argparse
import math
import re
import shlex
from collections.abc import Callable
from typing import NoReturn

from engine.errors import UserError


class Parser(argparse.ArgumentParser):
    """Raises a UserError for a mistake; lines of @FILE may have several flags and # comments."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the flags)")

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        try:
            return shlex.split(re.sub(r"(^|\s)#.*", "", line))
        except ValueError as error:  # a quote that is not closed
            self.error(f"@FILE, line {line!r}: {error}")


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Adds "(default: X)" to each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, []) and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


def at_least(low: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return an argparse type: a finite number of `low` or more."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            name = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text} is not {name} of {low} or more")
        return value

    return number
