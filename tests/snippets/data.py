"""What a project draws, and what it finds in a folder."""

import contextlib
import io
from pathlib import Path

import dataset
from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from flags import parse_args


def draw(folder: str, train: int, val: int) -> None:
    dataset.draw_demo(Path(folder), train, val)


def build(folder: str, image_size: int = 64, augment: str = "") -> tuple:
    """The training set, the validation set and the classes."""
    if not distributed.is_set_up():
        distributed.setup()
    words = ["--data", folder, "--image-size", image_size, "--augment", augment]
    return dataset.build_datasets(parse_args([*map(str, words)]))


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
