"""argparse for a program that runs in several ranks; without torch, for mistakes to show soon."""

import argparse
import contextlib
import math
import os
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ddpkit.errors import UserError, suggest

NOBODY: tuple[list[int], int] = ([], 5678)  # waits for a debugger; the port of rank 0
ALL_RANKS = -1  # in place of a list

# What other programs call a flag, and what ours is called
SYNONYMS = {
    "--encoder": "--backbone",
    "--arch": "--model --net --network --backbone",
    "--lr": "--learning-rate --rate",
    "--batch-size": "--batch --bs",
    "--image-size": "--imgsz --size --resolution",
    "--output-dir": "--out --name --project --save-dir",
    "--weights": "--pretrained",
    "--weight-decay": "--wd",
    "--resume": "--checkpoint --ckpt",
    "--eval-only": "--eval --evaluate --test --val --validate",
    "--amp": "--fp16 --bf16 --half --precision",
}
# flags that one kind of project has
OF_TASKS = {
    "classification": "--crop-pct --crop-scale --drop-path --grad-checkpointing",
    "segmentation": "--cutmix --encoder --loss --tile",
}
OF_A_START = ("resume", "eval_only", "json")  # of which a run is not another one
OF_LAUNCHERS = "--gpu --gpus --num-gpus --device --devices --nproc --nproc-per-node"


class LaunchFlags(NamedTuple):
    """How this rank was started: flags that Parser takes for itself."""

    local_rank: int | None = None
    dist_timeout: float = 600.0
    debug_rank: tuple[list[int], int] = NOBODY


# Set by Parser.parse alone. Not passed on: they are none of a project's flags, and so
# what it calls, `rendezvous` and `configure`, has no argument for them.
_launch = LaunchFlags()


def launch_flags() -> LaunchFlags:
    return _launch


class Help(
    argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=118)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # "default: False" would tell nothing; 0, which equals it, does
        if action.default in (None, NOBODY) or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An argument parser for a script that runs on several ranks.

    A mistake raises a UserError, one line; help is printed by the first rank of a node alone. A
    `@FILE` among the arguments stands for the flags in that file, several in a line if you like;
    a # before a word begins a comment. -1,5 is a value, not a flag. In a Path or a text ~/ is the
    home folder: a shell replaces it neither in FILE nor after a = sign.

        parser = ddpkit.Parser(description="Train a network.")
        parser.add_argument("--epochs", type=parser.at_least(1), default=30)
        args = parser.parse()
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", Help)
        options.setdefault("fromfile_prefix_chars", "@")
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        # -1000,3000 is a value, too, not only -1000
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.register("type", Path, lambda text: Path(at_home(text)))
        self.register("type", str, at_home)
        self.register("type", None, at_home)  # flags without a type

    def parse(
        self,
        argv: Sequence[str] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> argparse.Namespace:
        """Return the flags of `argv`, sys.argv by default; `defaults` replace those of the flags.

        defaults: by name, such as the "args" of a checkpoint; text is converted to the flag's type.
        The flags of launcher and debugger, which `setup` reads, are taken, too, but not returned.
        """
        if "--dist-timeout" not in self._option_string_actions:  # parse may come twice
            add = self.add_argument_group("ranks").add_argument
            add("--dist-timeout", metavar="SECONDS", type=self.at_least(1, float), default=600.0,
                help="how long a rank waits for the others; a week while debugging")  # fmt: skip
            names = ["--debug", "--debug-rank"]
            # Projects may have a --debug of their own.
            names = [name for name in names if name not in self._option_string_actions]
            add(*names, dest="debug_rank", metavar="R[,R...][:PORT]", nargs="?", type=ranks,
                const="all", default=NOBODY,
                help="ranks that await a debugger, or all of them, R at port 5678 + R")  # fmt: skip
            add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
        defaults = defaults or {}
        self.set_defaults(**defaults)
        for action in self._actions:
            if action.dest in defaults:
                action.required = False
        args, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(self._explain_unknown(unknown))
        global _launch
        taken = {name: vars(args).pop(name) for name in LaunchFlags._fields}
        _launch = LaunchFlags(**taken)
        return args

    @staticmethod
    def at_least(
        low: float,
        kind: type[int] | type[float] = int,
        below: float = math.inf,
        most: float = math.inf,
    ) -> Callable[[str], float]:
        """Return an argparse type: a finite number of `low` or more.

        It is less than `below`, and at most `most`. kind: int or float.

            parser.add_argument("--dropout", type=parser.at_least(0, float, below=1))
        """

        def convert(text: str) -> float:
            with contextlib.suppress(ValueError):
                value = kind(text)
                if low <= value < below and value <= most:
                    return value
            name = "an integer" if kind is int else "a number"
            end = "" if below == math.inf else f" and less than {below:g}"
            if most < math.inf:
                end = f" and at most {most:g}"
            raise ArgumentTypeError(f"{text} is not {name} of {low} or more{end}")

        return convert

    @staticmethod
    def class_weights(text: str) -> str | tuple[float, ...]:
        """Convert auto, or A,B,... to numbers of at least 0, of which one is not 0."""
        if text == "auto":
            return text
        # also (1.0, 2.5), as Python prints a tuple
        parts = re.sub(r"[()\s]", "", text).strip(",").split(",")
        with contextlib.suppress(ValueError):
            values = tuple(float(part) for part in parts)
            if all(0 <= value < math.inf for value in values) and any(values):
                return values
        raise ArgumentTypeError(
            f"{text}: expected auto, or numbers of 0 or more, not all 0"
        )

    @staticmethod
    def fold(text: str | Sequence[int]) -> tuple[int, int]:
        """Convert 2/5, the second of five parts, to numbers."""
        found = text.split("/") if isinstance(text, str) else text
        with contextlib.suppress(ValueError):
            part, parts = map(int, found)
            if 1 <= part <= parts > 1:
                return part, parts
        raise ArgumentTypeError(
            f"{text}: expected N/K, the N-th of K parts, such as 2/5"
        )

    def _explain_unknown(self, words: Sequence[str]) -> str:
        """Return what may have been meant by `words`, which no flag takes."""
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        hints = [flag + self._hint(flag) for flag in flags]
        return "; ".join(hints) or f"unrecognized arguments: {' '.join(words)}"

    def _hint(self, flag: str) -> str:
        known = self._option_string_actions
        if flag in OF_LAUNCHERS.split():
            return (
                ": no such flag; ./launch.sh takes all GPUs, CUDA_VISIBLE_DEVICES=0,1 "
                "./launch.sh some of them, NPROC=2 ./launch.sh so many processes"
            )
        for task, names in OF_TASKS.items():
            if flag in names.split():
                return f": a flag of {task} projects"
        for name, others in SYNONYMS.items():
            if name in known and flag in others.split():
                return f": no such flag; did you mean {name}?"
        return f": no such flag{suggest(flag, known)}"

    # argparse calls it for what is in a FILE, too
    def _read_args_from_files(self, arg_strings: list[str]) -> list[str]:
        return super()._read_args_from_files([at_home(text) for text in arg_strings])

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the flags)")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            before_comment = re.split(r"(?<!\S)#", arg_line)[0]
            return shlex.split(before_comment)
        except ValueError as error:  # a quote that is not closed
            self.error(f"@FILE, line {arg_line!r}: {error}")


def task_of(flags: Collection[str]) -> str:
    """Return the task all of whose own flags are among `flags`, by their names, or nothing."""
    for task, names in OF_TASKS.items():
        own = [name.removeprefix("--").replace("-", "_") for name in names.split()]
        if all(name in flags for name in own):
            return task
    return ""


def at_home(text: Any) -> Any:
    """Return `text` with the home folder for a ~ at its beginning, or after an @."""
    is_path = isinstance(text, str) and re.match(r"@?~[\w.-]*(/|$)", text)
    if not is_path:
        return text
    at, _, rest = text.partition("~")
    return at + os.path.expanduser("~" + rest)


def ranks(text: str) -> tuple[list[int], int]:
    """Convert all, 0,3 or 0,3:5678 to ranks and the port of rank 0."""
    some, _, port = text.partition(":")
    port = port or str(NOBODY[1])
    numbers = ["0"] if some == "all" else some.split(",")
    are_numbers = all(each.isdecimal() for each in [port, *numbers])
    if not are_numbers or not 0 < int(port) < 2**16:
        raise ArgumentTypeError(
            f"{text} is not a rank or a list of ranks, such as 0,3 or 0,3:5678"
        )
    if some == "all":
        return [ALL_RANKS], int(port)
    return sorted({int(each) for each in numbers}), int(port)
