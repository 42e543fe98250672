"""What lies in a folder of images and labels, read once."""

import csv
import functools
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpkit import files
from ddpkit.data import folders
from ddpkit.errors import UserError, reason_of

ENDINGS = folders.EXTENSIONS | {".npy"}  # of images
Json = Any  # what a file of JSON or YAML may hold


class Tree:
    """The files below a folder, as paths with / from there; of a file, those beside or above it.

    named: the file that the user has named, as the only one with labels.
    """

    def __init__(self, source: Path) -> None:
        self.named = source if source.is_file() else None
        self.root = source.parent if self.named else source
        if not self.root.is_dir():
            raise UserError(
                f"{source}: no such file or folder; name what has the labels"
            )
        self.files = self.find_files()
        if self.named and not self.in_folder(""):
            # such as annotations/instances_train2017.json beside train2017
            self.root = Path(os.path.normpath(self.root / ".."))
            self.files = self.find_files()

    def find_files(self) -> list[str]:
        found = []
        for parent, _, names in folders.walk(self.root):
            # `walk` goes through the real folder
            below = os.path.relpath(parent, self.root.resolve())
            for name in sorted(names):
                if not name.startswith("."):
                    found.append((Path(below) / name).as_posix())
        return found

    def path(self, name: str) -> Path:
        return self.root / name

    def below(self, path: Path) -> str:
        """Return the name of a path in this folder."""
        return Path(os.path.relpath(path, self.root)).as_posix()

    def with_ending(self, *endings: str) -> list[str]:
        """Return the files with one of these endings; of a named file that alone."""
        found = [self.below(self.named)] if self.named else self.files
        return [name for name in found if ending_of(name) in endings]

    def in_folder(self, folder: str, endings: set[str] = ENDINGS) -> list[str]:
        """Return the files anywhere in `folder`, "" for all, with one of these endings."""
        start = f"{folder}/" if folder else ""
        return [
            name
            for name in self.files
            if name.startswith(start) and ending_of(name) in endings
        ]

    @functools.cached_property
    def folders(self) -> list[str]:
        """All folders that have files in them or below; "" is the outermost."""
        found = {""}
        for name in self.files:
            parents = [parent.as_posix() for parent in Path(name).parents]
            found.update(parent for parent in parents if parent != ".")
        return sorted(found)

    @functools.cached_property
    def images_by_name(self) -> dict[str, list[str]]:
        """The images by the last part of their names, with and without the ending."""
        found: dict[str, list[str]] = {}
        for name in self.files:
            if ending_of(name) in ENDINGS:
                last = name.rpartition("/")[2]
                stem = os.path.splitext(last)[0]
                for key in {last, stem}:
                    found.setdefault(key, []).append(name)
        return found

    def find_image(self, given: str, near: str, part: str = "") -> Path | None:
        """Return the image that a label file names, or None.

        given: its path or name, with or without an ending. near: the label file. part: of several
        images of that name the one that lies in this part is meant, or the one next to `near`.
        Raises a UserError if several are possible.
        """
        given = given.replace("\\", "/")
        beside = self.path(near).parent / given
        if ending_of(given) in ENDINGS and beside.is_file():
            return beside
        last = given.rpartition("/")[2]
        found = self.images_by_name.get(last, [])
        if not found and ending_of(last):
            # such as x.tif for x.png, after somebody has saved the images anew
            found = self.images_by_name.get(os.path.splitext(last)[0], [])
        # more of the path than its last part may tell them apart
        for wanted in (
            lambda name: f"/{name}".endswith(f"/{given}"),
            lambda name: part and part in name.lower(),
            lambda name: Path(name).parent == Path(near).parent,
        ):
            fitting = [name for name in found if wanted(name)]
            if len(found) > 1 and fitting:
                found = fitting
        if len(found) > 1:
            raise UserError(
                f"{self.path(near)}: {given} may be {found[0]} or {found[1]}; remove or rename "
                "one of them"
            )
        return self.path(found[0]) if found else None

    @functools.cached_property
    def jsons(self) -> dict[str, Json]:
        """What the JSON files hold, by name; a UserError in place of one that is none."""
        found: dict[str, Json] = {}
        for name in self.with_ending(".json"):
            try:
                content = json.loads(files.read_file(self.path(name)))
            except (ValueError, RecursionError) as error:
                content = UserError(
                    f"{self.path(name)}: no JSON ({reason_of(error)}); repair or remove it",
                    "tree.jsons",
                )
            if isinstance(content, dict):
                content.pop("imageData", None)  # LabelMe's copy of the image
            found[name] = content
        return found

    def refuse_broken(self) -> None:
        """Raise a UserError if a JSON file could not be read."""
        for content in self.jsons.values():
            if isinstance(content, UserError):
                raise content

    def lines(self, name: str) -> list[str]:
        """Return the lines of a text file that are not empty, without blanks around them."""
        text = files.read_file(self.path(name)).decode("utf-8-sig", "replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def rows(self, name: str) -> Iterator[dict[str, str]]:
        """Yield the rows of a CSV file, with the blanks around names and values removed."""
        text = files.read_file(self.path(name)).decode("utf-8-sig", "replace")
        first = text.partition("\n")[0]
        # a list of runs has blanks within
        separator = max(",;\t", key=first.count)
        csv.field_size_limit(2**31 - 1)  # runs of a large mask are one cell
        for row in csv.DictReader(io.StringIO(text, newline=""), delimiter=separator):
            values = {
                (key or "").strip(): (value or "").strip()
                for key, value in row.items()
                if isinstance(value, str | None)
            }
            if any(values.values()):
                yield values


def ending_of(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def stem_of(name: str) -> str:
    return os.path.splitext(name.rpartition("/")[2])[0]
