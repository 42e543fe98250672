"""argparse for a program that runs in several ranks; without torch, for mistakes to show soon."""

import argparse
import contextlib
import math
import os
import re
import shlex
import shutil
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddpkit import files
from ddpkit.errors import UserError, suggest
from ddpkit.ranks import debugger

DEBUG_PORT = 5678  # of rank 0, which awaits a debugger there
ALL_RANKS = -1  # in place of a list
SCALAR = (str, int, float, Path)

# Those of which a run is not another one
OF_A_START = ("resume", "eval_only", "json", "local_rank", "dist_timeout", "debug")


class Help(
    argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size((120, 24)).columns
        super().__init__(prog, max_help_position=30, width=columns - 2)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # "default: False" would tell nothing; 0, which equals it, does
        if action.default in (None, "") or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An argparse.ArgumentParser for a script that runs on several ranks.

    A mistake raises a UserError, one line; help is printed by the first rank of a node alone. A
    `@FILE` among the arguments stands for the flags in that file, several in a line if you like;
    a # before a word begins a comment, and $NAME stands for the variable's value. -1,5 is a value,
    not a flag. In a Path or a text ~/ is the home folder: a shell replaces it neither in FILE nor
    after a = sign. A flag that `set_defaults` has a value for need not be given; the value is read
    as if it were typed.

    parser: an argparse.ArgumentParser whose flags, groups, defaults and texts are taken over.

        parser = argparse.ArgumentParser(description="Train a network.")
        parser.add_argument("--epochs", type=ddpkit.Parser.at_least(1), default=30)
        args = ddpkit.Parser(parser).parse_args()
    """

    def __init__(
        self, parser: argparse.ArgumentParser | None = None, **options: Any
    ) -> None:
        if parser:
            for name in ("prog", "usage", "description", "epilog"):
                options[name] = getattr(parser, name)
            options.update(parents=[parser], add_help=False)  # it has --help
        options.setdefault("formatter_class", Help)
        options.setdefault("fromfile_prefix_chars", "@")
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        # -1000,3000 is a value, too, not only -1000
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.register("type", Path, lambda text: Path(at_home(text)))
        self.register("type", str, at_home)
        self.register("type", None, at_home)  # flags without a type

    def set_defaults(self, **defaults: Any) -> None:
        action_of = {action.dest: action for action in self._actions}
        for name, value in defaults.items():
            action = action_of.get(name)
            if action:
                action.required = False
            before = self.get_default(name)
            # without a flag it is of the data, such as a project's crop, which may be None
            if value is None and (before is None or not action):
                continue
            takes_text = action and is_reread(action)
            kinds: tuple = (type(before), int)
            if takes_text:
                kinds = SCALAR
            elif isinstance(before, bool):
                kinds = (bool,)
            if isinstance(before, SCALAR) and not isinstance(value, kinds):
                flag = name.replace("_", "-")
                self.error(
                    f"--{flag}: the saved value is {value!r:.60}, not one like {before!r}"
                )
            if takes_text:  # argparse makes the value of it
                words = value if isinstance(value, list | tuple) else [value]
                defaults[name] = ",".join(map(str, words))
        super().set_defaults(**defaults)

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
        with contextlib.suppress(ValueError):
            values = tuple(map(float, text.split(",")))
            if all(0 <= value < math.inf for value in values) and any(values):
                return values
        raise ArgumentTypeError(
            f"{text}: expected auto, or non-negative numbers, not all 0"
        )

    @staticmethod
    def fold(text: str) -> tuple[int, int]:
        """Convert 2/5, the second of five parts, to numbers."""
        with contextlib.suppress(ValueError):
            number, count = map(int, re.split("[/,]", text))
            if 1 <= number <= count > 1:
                return number, count
        raise ArgumentTypeError(f"{text}: expected N/K, fold N of K, such as 2/5")

    @staticmethod
    def ranks(text: str) -> tuple[list[int], int]:
        """Convert all, 0,3 or 0,3:5678 to ranks and the port of rank 0."""
        match = re.fullmatch(r"(all|\d+(?:,\d+)*)(?::(\d*))?", text)
        port = int(match[2] or DEBUG_PORT) if match else 0
        if not match or not 0 < port < 2**16:
            raise ArgumentTypeError(
                f"{text} is not a rank or a list of ranks, such as 0,3 or 0,3:5678"
            )
        debugger.find()  # before torch is imported
        if match[1] == "all":
            return [ALL_RANKS], port
        return sorted({int(each) for each in match[1].split(",")}), port

    def _hint(self, word: str) -> str:
        known = self._option_string_actions
        flag = f"--{word.lstrip('-')}"
        near = suggest(flag, [flag] if flag in known else known)
        if word[:1] != "-" and not near:
            flag = "--data" if os.path.exists(word) else "--epochs"
            return f": a value without its flag, as in {flag} {word}"
        return f": no such flag{near}"

    # in place of argparse's own, which would read /dev/zero without end
    def _read_args_from_files(
        self, arg_strings: Sequence[str], around: Sequence[str] = ()
    ) -> list[str]:
        words = []
        for word in arg_strings:
            if word[:1] not in (self.fromfile_prefix_chars or ()):
                words.append(word)
                continue
            if word in around:
                self.error(f"{word} includes itself")
            path = Path(at_home(word[1:]))
            if not path.exists():
                raise UserError(f"{path}: no such file")
            for line in files.read_text(path).splitlines():
                inner = self.convert_arg_line_to_args(line)
                words += self._read_args_from_files(inner, [*around, word])
        return words

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        # what argparse says, with what to type instead
        what, _, rest = message.partition("arguments: ")
        if what == "unrecognized ":
            words = [re.split("[=:]", word)[0] for word in rest.split()]
            unknown = [word for word in words if word[:1] == "-"] or words[:1]
            message = "; ".join(word + self._hint(word) for word in unknown)
        message = message.removeprefix("argument ")
        raise UserError(f"{message} ({self.prog} --help lists the flags)")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            before_comment = re.split(r"(?<!\S)#", arg_line)[0]
            words = shlex.split(before_comment)
        except ValueError as error:  # a quote that is not closed
            self.error(f"@FILE, line {arg_line!r}: {error}")
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)", " ".join(words)):
            if name not in os.environ:
                self.error(f"@FILE, line {arg_line!r}: the variable {name} is not set")
        return [os.path.expandvars(word) for word in words]


def is_reread(action: argparse.Action) -> bool:
    """Return whether a flag takes as text, too, what it has made of text.

    A type of the user's own may not: 50 % as 0.5, for instance.
    """
    is_known = action.type in (*SCALAR, None)
    is_known |= getattr(action.type, "__module__", "") == __name__
    is_one = action.nargs in (None, "?") and isinstance(action, argparse._StoreAction)
    return is_known and is_one


def at_home(text: Any) -> Any:
    """Return `text` with the home folder for a ~ at its beginning."""
    return os.path.expanduser(text) if isinstance(text, str) else text
