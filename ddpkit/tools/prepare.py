"""Decode a data set once, for training that is slowed down by reading its images.

    python -m ddpkit prepare --data DIR --output FAST
    ./launch.sh --data FAST

FAST appears once it is whole.
"""

import functools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from ddpkit import files
from ddpkit.data import loading
from ddpkit.data.folders import VAL_NAMES, Files
from ddpkit.data.format import NAME, write_format
from ddpkit.data.prepared import describe, is_store, read
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, process
from ddpkit.run import machine
from ddpkit.run.flags import Parser, at_least


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m ddpkit prepare", description=__doc__)
    add = parser.add_argument
    add("--data", metavar="DIR", type=Path, required=True, help="as of main.py")
    add("--output", metavar="FAST", type=Path, required=True, help="folder to make")
    add("--short-side", metavar="PIXELS", type=at_least(0),
        help="shrink images to this; 0: not at all (default: dataset.SHORT_SIDE)")  # fmt: skip
    add("--workers", type=at_least(0), default=machine.cpus(), help="processes that read")
    given = parser.parse_args(argv)
    dataset, parse_args = process.own("dataset"), process.own("flags").parse_args
    side = dataset.SHORT_SIDE if given.short_side is None else given.short_side
    distributed.setup(alone=True)
    if is_store(given.data):
        raise UserError(f"--data {given.data} is prepared already; pass it to main.py")
    data = given.data.resolve()  # the paths of its files are those that training will find
    places = [data / name for name in ("train", *VAL_NAMES)]
    if not places[0].is_dir():
        places = [data]
    if any(map(given.output.resolve().is_relative_to, places)):
        raise UserError(f"{given.output}: inside the data set {data}; name a folder elsewhere")
    train, val, classes = dataset.build_datasets(parse_args(["--data", str(data)]))
    if not (isinstance(train, Files) and isinstance(val, Files)):
        kind = type(train).__name__
        raise UserError(f"dataset.py returns {kind}, whose samples are no files to be prepared")
    if train.format.channels:
        line = "prepared data is RGB of 8 bits; train on"
        raise UserError(f'{data / NAME}: "channels": {line} {data} itself')
    write(given.output, data, [train, val], classes, side, given.workers)
    distributed.teardown()


def write(
    folder: Path, source: Path, parts: list, classes: Sequence[str], side: int, workers: int
) -> None:
    """Write the images of `parts`, the data sets for training and validation, to `folder`.

    side: the shorter side of the images in pixels; smaller ones keep their size, and with 0 all do.
    """
    format, each, samples = parts[0].format, len(parts[0].open(0)), [p.samples for p in parts]
    plan = describe(source, side, format, classes, samples, each)
    if (found := read(folder)) and found[0] == plan:
        return distributed.say(f"{folder}: prepared already, and {source} has not changed")
    if folder.exists():
        raise UserError(
            f"{folder}: there already, and not made of {source} as it is, with these flags; "
            "remove it, or name another folder"
        )
    with files.filling(folder) as partial:
        write_format(partial, format)
        (partial / "index.json").write_text(json.dumps(plan))
        _fill(partial, parts, side, workers)
        for path in partial.iterdir():
            files.sync(path)
    distributed.say(
        f"{folder}: {sum(map(len, samples))} samples; train with --data {shlex.quote(str(folder))}"
    )


def _read_small(side: int, key: tuple[Any, int]) -> list[Tensor]:
    """Return all images and masks of a sample, the shorter side shrunk to `side` pixels."""
    found = []
    for image in key[0].open(key[1]):
        scale = min(side / min(image.height, image.width), 1) if side else 1
        found.append(image.read(size=(round(image.height * scale), round(image.width * scale))))
    return found


def _fill(folder: Path, parts: list, side: int, workers: int) -> None:
    keys = [(part, index) for part in parts for index in range(len(part.samples))]
    options = loading.workers(workers, torch.device("cpu"))
    read = functools.partial(_read_small, side)
    loader: DataLoader = DataLoader(keys, None, collate_fn=read, **options)  # type: ignore
    end, rows = 0, []
    with open(folder / "pixels.bin", "wb") as file:
        for sample in tqdm(loader, total=len(keys), unit="sample", disable=None):
            for tensor in sample:
                is_mask = tensor.ndim == 2
                file.write((tensor if is_mask else tensor.movedim(0, -1)).numpy().tobytes())
                rows.append((end, *tensor.shape[-2:], 0 if is_mask else 3))
                end += tensor.numel()
    np.array(rows, np.int64).tofile(folder / "rows.bin")
