"""Tools for a project, to be run in its folder: python -m ddpkit COMMAND

  check DIR      read every file of a dataset, list what is wrong with it, and draw samples
  convert SOURCE OUT
                 make a dataset from COCO, YOLO, VOC, LabelMe, CVAT and other labels
  compare RUN... list runs by their best epoch, with the flags in which they differ
  export         write a checkpoint as an ONNX file
  publish        write a model card, and push it with the checkpoint to the Hugging Face hub
  where          have a run print where its ranks are
  launch SCRIPT  start any script with its flags on all GPUs, as launch.sh starts main.py
  copy           copy this library into the project, to edit it

Each has a --help.
"""

import importlib
import os
import shutil
import sys
from pathlib import Path

import ddpkit
from ddpkit import files, launch, version
from ddpkit.errors import print_error, print_line
from ddpkit.ranks import environment, process, protocol
from ddpkit.run.flags import Parser
from ddpkit.vision.tools import arguments

# By name, the module, and what checks their flags before torch is imported; they leave
# GPUs to those who need one.
ON_CPU = {
    "check": ("vision.tools.check", arguments.parse_check),
    "convert": ("convert.command", None),
    "export": ("vision.tools.export", arguments.EXPORT.parse_args),
    "publish": ("vision.tools.publish", arguments.PUBLISH.parse_args),
}


def where() -> None:
    """Have a run print where each rank is, in the run's own terminal or log."""
    parser = Parser(prog="python -m ddpkit where", description=where.__doc__)
    parser.add_argument(
        "run",
        nargs="?",
        metavar="OUTPUT_DIR",
        default="runs/default",
        type=Path,
        help="of the run",
    )
    folder = parser.parse_args().run
    if not (folder / ".lock").exists():
        raise ddpkit.UserError(
            f"{folder}: no run has written here; give the --output-dir of a run"
        )
    # rank 0 of the run looks for this file
    (folder / protocol.QUESTION).touch()
    done = f"request sent: a run in {folder} answers in its own terminal or log"
    print_line(done, sys.stdout)


def copy() -> None:
    """Copy the installed ddpkit into the project, which uses it until you remove it."""
    Parser(prog="python -m ddpkit copy", description=copy.__doc__).parse_args()
    project = process.project()
    if not (project / "main.py").is_file():
        raise ddpkit.UserError(
            f"no main.py in {project}: run this in the project's folder"
        )
    target = project / "ddpkit"
    if target.exists():
        raise ddpkit.UserError(f"{target} already exists; remove it to copy again")
    own = version.FOLDER  # the installed one, as there is no other
    with files.filling(target) as partial:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(own, partial, ignore=ignored, dirs_exist_ok=True)
    done = f"copied {own} to {target}, which is used from now on"
    print_line(done, sys.stdout)


def compare() -> None:
    importlib.import_module("ddpkit.vision.tools.compare").main()


# These need no torch, which takes seconds to import.
COMMANDS = {"compare": compare, "where": where, "copy": copy}


def main() -> None:
    name = sys.argv.pop(1) if sys.argv[1:] else "--help"
    if name in ("-h", "--help"):
        print_line(__doc__.rstrip(), sys.stdout)
    elif name == "launch":
        sys.exit(launch.main(sys.argv[1:] or ["--help"]))
    elif name in COMMANDS:
        COMMANDS[name]()
    elif name in ON_CPU:
        os.environ[environment.GPUS] = ""  # before torch looks for them
        module, parse_args = ON_CPU[name]
        ddpkit.before_imports(parse_args)
        ddpkit.run_main(importlib.import_module(f"ddpkit.{module}").main)
    else:
        names = ", ".join((*ON_CPU, *COMMANDS, "launch"))
        raise ddpkit.UserError(f"python -m ddpkit {name}: use one of {names}")


if __name__ == "__main__":
    try:
        main()
    except ddpkit.UserError as error:
        print_error(error)
        sys.exit(protocol.MISTAKE)
