"""What a project draws, and what it finds in a folder."""

import contextlib
import io
from pathlib import Path

import dataset
import demo_set
from engine.errors import UserError
from engine.ranks import distributed


def draw(folder: str, train: int, val: int) -> None:
    demo_set.draw(Path(folder), train, val)


def build(folder: str) -> tuple:
    distributed.setup()
    return dataset.build_dataset(Path(folder), 64)


def found(folder: str) -> str:
    """How many pictures of which classes."""
    train, val, classes = build(folder)
    return " ".join(map(str, (len(train), len(val), *classes)))


def parts(folder: str) -> dict:
    """The paths in the training and the validation set, seen from `folder`, and what is said."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train, val, _ = build(folder)
    paths = [
        [Path(sample[0]).relative_to(folder).as_posix() for sample in part.samples]
        for part in (train, val)
    ]
    return {"parts": paths, "said": said.getvalue()}


def refusal(folder: str) -> str:
    """The line that says what is wrong with a folder."""
    try:
        return f"found: {found(folder)}"
    except UserError as error:
        return str(error)
