"""Copy the installed ddpkit into the project, to edit it there or for machines without a network.

The copy beside main.py is then the one that runs. --undo removes it if it is as installed.
"""

import importlib.machinery
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpkit import files
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import process
from ddpkit.run.flags import Parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m ddpkit copy", description=__doc__)
    parser.add_argument("--undo", action="store_true", help="remove the copy if it is as installed")
    undo, copy = parser.parse_args(argv).undo, process.project() / "ddpkit"
    if not copy.with_name("main.py").is_file():
        raise UserError(f"no main.py in {copy.parent}: run this in the project's folder")
    installed = find_installed(copy.parent)
    if undo:
        remove(copy, installed)
        print(f"removed {copy}: from now on {installed} is used")
    else:
        if copy.exists():
            raise UserError(f"{copy} is there already; --undo removes it")
        with files.filling(copy) as partial:
            for name in list_files(installed):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(installed / name, partial / name)
        print(f"copied {installed} to {copy}, which is used from now on; --undo removes it")


def find_installed(project: Path) -> Path:
    """Return the folder of the ddpkit that is used if `project` has none."""
    places = [place for place in sys.path if Path(place).resolve() != project]
    spec = importlib.machinery.PathFinder.find_spec("ddpkit", places)
    if not spec or not spec.origin:  # a namespace package has none
        line = f"{sys.executable} has no other ddpkit installed: pip install it first"
        raise UserError(f"{line}, as the first line of a requirements.txt says")
    return Path(spec.origin).resolve().parent


def remove(copy: Path, installed: Path) -> None:
    """Remove `copy` if each of its files is one of `installed`, with the same content."""
    if copy.is_symlink() or not copy.is_dir():
        raise UserError(f"{copy} is no copy of ddpkit")
    names = {*list_files(copy), *list_files(installed)}
    differ = sorted(str(name) for name in names if read(copy / name) != read(installed / name))
    if differ:
        line = f"{copy} is not {installed}: {shorten(differ)} differ"
        raise UserError(f"{line}; save what you have changed and remove the folder yourself")
    doomed = copy.rename(copy.with_name(f".ddpkit-{os.getpid()}"))  # gone at once, or not at all
    shutil.rmtree(doomed)


def list_files(folder: Path) -> list[Path]:
    """Return the files of a package, relative to it, without what Python has compiled."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder) for path in found if "__pycache__" not in path.parts]


def read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
