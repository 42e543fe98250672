"""Tools beside training, to be started in the project's folder: python -m ddpkit COMMAND

  check DIR      read every file of a data set, and list what is wrong with it
  export         write a checkpoint as an ONNX file
  where          have a run print where its ranks are
  copy           copy this library into the project, to edit it; --undo removes the copy

Each has a --help.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import ddpkit
from ddpkit.ranks import environment, protocol
from ddpkit.run.flags import Parser

COMMANDS = ("check", "export", "where", "copy")
ON_CPU = ("check", "export")  # they leave GPUs to those who need one


def where(argv: Sequence[str] | None = None) -> None:
    """Have a run print, in its own terminal or log, the line and the collective of each rank."""
    parser = Parser(prog="python -m ddpkit where", description=where.__doc__)
    parser.add_argument("run", nargs="?", metavar="OUTPUT_DIR", default="runs/default", type=Path,
        help="of the run (default: runs/default)")  # fmt: skip
    folder = parser.parse_args(argv).run
    if not (folder / ".lock").exists():
        raise ddpkit.UserError(f"{folder}: no run has written there; name its --output-dir")
    (folder / protocol.QUESTION).touch()
    print(f"asked: a run that is at work in {folder} answers in its own terminal or log")


def main() -> None:
    name = sys.argv.pop(1) if sys.argv[1:] else "--help"
    if name in ("-h", "--help"):
        print(__doc__, end="")
    elif name == "where":
        where()
    elif name in COMMANDS:
        importlib.import_module(f"ddpkit.tools.{name}").main()
    else:
        raise ddpkit.UserError(f"python -m ddpkit {name}: use one of {', '.join(COMMANDS)}")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ON_CPU:
        os.environ[environment.GPUS] = ""
    ddpkit.prepare()
    ddpkit.start(main)
