"""argparse for a program that runs in several ranks: errors are printed once, help has defaults."""

import argparse
import math
import re
import shlex
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from engine.errors import UserError
from engine.ranks import debugging


class Parser(argparse.ArgumentParser):
    """Raises a UserError for a mistake; lines of @FILE may have several flags and # comments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # also of -1000,3000: no flag

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


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Adds "(default: X)" to each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, []) and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


class OtherProgram(argparse.Action):
    """A flag that launch.sh takes: here it raises a UserError."""

    def __call__(self, *_: object) -> NoReturn:
        raise UserError("--check: start with ./launch.sh, or preflight.py in place of main.py")


def add_image_arguments(group: argparse._ArgumentGroup, is_network: bool = True) -> None:
    """Add the flags that say how image files become pixels: the fields of images.Format.

    is_network: also those that the network depends on, which a checkpoint knows.
    """
    add = group.add_argument
    add(
        "--value-range",
        metavar="LOW,HIGH",
        type=value_range,
        help="values that become 0 and 255 in images of more than 8 bits (default: 0,65535 for 16 "
        "bits, 0,1 for floats; without it an image that would be nearly black is an error)",
    )
    add(
        "--max-megapixels",
        metavar="N",
        type=at_least(1),
        default=179,
        help="larger images are an error, because a small file may claim any size",
    )
    if not is_network:
        return
    add(
        "--channels",
        metavar="N",
        type=at_least(1),
        help="read TIFF, .npy (and PNG, JPEG, ... if N is 1 or 3) with N channels of full depth "
        "(default: RGB of 8 bits)",
    )
    add(
        "--mean",
        metavar="A,B,...",
        type=numbers,
        help="of each channel, in units of 0..1; check_data.py prints it (default, if N is 1 or "
        "3: ImageNet's)",
    )
    add("--std", metavar="A,B,...", type=deviations, help="likewise, the deviation")


def add_machine_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags for ranks and loader workers, which affect nothing that is learned."""
    add = group.add_argument
    add(
        "--workers",
        type=at_least(0),
        help="loader processes per rank (default: CPUs of the job / ranks, at most 16)",
    )
    add("--prefetch", type=at_least(1), default=2, help="batches that each worker loads ahead")
    add(
        "--pin-memory",
        action=argparse.BooleanOptionalAction,
        help="faster copies to the GPU (default: on GPUs, if it takes at most 1/4 of the free "
        "memory)",
    )
    add(
        "--threads",
        type=at_least(1),
        help="torch CPU threads per rank (default: CPUs / ranks; with a GPU at most 4)",
    )
    add(
        "--dist-timeout",
        metavar="SECONDS",
        type=at_least(1, float),
        default=600.0,
        help="how long a rank waits for the others; a week while debugging",
    )
    add(
        "--debug-rank",
        metavar="R[,R...]",
        type=debugging.ranks,
        default=[],
        help="ranks that wait for a debugger, rank R at --debug-port + R",
    )
    add(
        "--debug-port",
        metavar="[HOST:]PORT",
        type=debugging.address,
        default="127.0.0.1:5678",
        help="for the debugger of rank 0; loopback unless HOST is given",
    )
    add(
        "--check",
        action=OtherProgram,
        nargs=0,
        default=argparse.SUPPRESS,
        help="of launch.sh: instead of training, check nodes, data and network in a minute",
    )
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)


def value_range(text: str) -> tuple[float, float]:
    """Convert LOW,HIGH, two numbers of which the second is larger."""
    try:
        low, high = map(float, re.sub(r"[()\s]", "", text).split(","))  # checkpoints: (LOW, HIGH)
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected two numbers LOW,HIGH with LOW < HIGH")
    return low, high


def numbers(text: str) -> tuple[float, ...]:
    """Convert A,B,... to finite numbers."""
    try:
        values = tuple(map(float, re.sub(r"[()\s]", "", text).split(",")))
    except ValueError:
        values = (math.nan,)
    if not all(map(math.isfinite, values)):
        raise argparse.ArgumentTypeError(f"{text}: expected numbers A,B,...")
    return values


def class_weights(text: str) -> str | tuple[float, ...]:
    """Convert A,B,... to numbers of at least 0; other text, such as a file's name, stays."""
    try:
        values = numbers(text)
    except argparse.ArgumentTypeError:
        if text.strip():
            return text
        values = ()
    if not any(values) or min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers of 0 or more, not all 0")
    return values


def below_one(text: str) -> float:
    """Convert a number of at least 0 and less than 1."""
    value = at_least(0, float)(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text} is not less than 1")
    return value


def deviations(text: str) -> tuple[float, ...]:
    """Convert A,B,... to finite numbers above 0."""
    values = numbers(text)
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers above 0")
    return values


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: NAME,NAME,... of `known`."""

    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return found

    return names


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
