"""What lies in a folder of images and labels, read once."""

import functools
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ddpkit import files
from ddpkit.convert.labels import LabelledSet
from ddpkit.errors import UserError
from ddpkit.vision import folders, lists
from ddpkit.vision.names import seen
from ddpkit.vision.places import part_of

ENDINGS = folders.EXTENSIONS | {".npy"}  # of images
# Folders that say nothing about which image is meant. In small letters.
USUAL = {"", ".", "..", "images", "image", "imgs", "img", "jpegimages", "data"}
MOST = 100_000  # bytes of the beginning of a file
Json = Any  # what a file of JSON or YAML may hold
Rows = Sequence[tuple[int, dict[str, Json]]]  # with the numbers of their lines


class Tree:
    """The files below a folder, as paths with / from there; of a file, those beside or above it.

    named: the file that the user has named, as the only one with labels. beyond: links that lead
    out of the folder, which are passed over unless `follows_links`.
    """

    def __init__(self, source: Path, follows_links: bool = False) -> None:
        self.follows_links = follows_links
        self.named = source if source.is_file() else None
        self.given_of: dict[str, str] = {}  # by image: the name that has led to it
        self.root = source.parent if self.named else source
        if not self.root.is_dir():
            raise UserError(
                f"{source}: no such file or folder; give the one with the labels"
            )
        self.files = self.find_files()
        if self.named and not self.in_folder(""):
            # such as annotations/instances_train2017.json beside train2017
            self.root = Path(os.path.normpath(self.root / ".."))
            self.files = self.find_files()

    def find_files(self) -> list[str]:
        self.beyond: list[str] = []
        self.real_root = self.root.resolve()
        paths = []
        for parent, inner, names in folders.walk(self.root):
            # `walk` goes on with what is in this list
            inner[:] = [x for x in inner if not self.leads_out(Path(parent, x))]
            for name in sorted(names):
                path = Path(parent, name)
                if not name.startswith(".") and not self.leads_out(path):
                    paths.append(self.below(path))
        return paths

    def leads_out(self, path: Path) -> bool:
        """Return whether a link leads to what is not in the folder, and note it."""
        if self.follows_links or not os.path.islink(path):  # no error of a long name
            return False
        leads_out = not Path(os.path.realpath(path)).is_relative_to(self.real_root)
        if leads_out:
            self.beyond.append(self.below(path))
        return leads_out

    def path(self, name: str) -> Path:
        return self.root / name

    def below(self, path: Path) -> str:
        """Return the name of a path in this folder."""
        return Path(os.path.relpath(path, self.root)).as_posix()

    def with_ending(self, *endings: str) -> list[str]:
        """Return the files with one of these endings; of a named file that alone."""
        names = [self.below(self.named)] if self.named else self.files
        return [name for name in names if ending_of(name) in endings]

    def files_named(self, *names: str) -> list[str]:
        """Return the files in any folder that have one of these names."""
        return [name for name in self.files if name.rpartition("/")[2] in names]

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
        names = {
            parent.as_posix() for name in self.files for parent in Path(name).parents
        }
        return sorted(names - {"."} | {""})

    @functools.cached_property
    def images_by_name(self) -> dict[str, list[str]]:
        """The images by the last part of their names, as it looks, with and without the ending."""
        images: dict[str, list[str]] = {}
        for name in self.in_folder(""):
            for key in (name.rpartition("/")[2], stem_of(name)):
                images.setdefault(seen(key), []).append(name)
        return images

    def find_sample(
        self, given: str, near: str, stated: str = ""
    ) -> tuple[Path | None, str]:
        """Return the image that a label file names, or None, and the part it belongs to.

        given, near: as in `find_image`. stated: the part, if the labels say it; else the name of
        the label file decides, then the folders in `given`, then those that the image lies in.
        """
        part = stated or part_of(near) or part_of(folder_of(slashes(given)))
        path = self.find_image(given, near, part)
        if path is None and stated and part_of(near):
            # then it may lie where the other images of the file do
            path = self.find_image(given, near, part_of(near))
        if path and not part:
            part = self.part_of_image(path)
        return path, part or "train"

    def part_of_image(self, path: Path) -> str:
        """Return the part that the folders of an image name; without a name it is train."""
        return part_of(folder_of(self.below(path))) or "train"

    def find_image(self, given: str, near: str, part: str = "") -> Path | None:
        """Return the image that a label file names, or None.

        given: its path or name, with or without an ending. near: the label file. part: where the
        image has to lie, if that part has folders of its own. Of several images of that name the
        one is meant whose path has most in common with `given`, or that lies in this part, or next
        to `near`. One in other folders than those that `given` names is none of them.
        Raises a UserError if several are possible, or if another name has led to the same image.
        """
        given = slashes(given)
        beside = self.path(near).parent / given
        if ending_of(given) in ENDINGS and os.path.isfile(beside):
            self.refuse_outside(beside, near)
            if self.below(beside) in self.names:
                return beside
        named = self.named_as(given)
        images = [name for name in named if self.may_be(name, given, near, part)]
        if not images:
            return None

        def rank(name: str) -> tuple:
            folder = folder_of(name)
            is_in_part = part_of(folder) == (part or "train")
            return (common_end(name, given), is_in_part, folder == folder_of(near))

        best = max(map(rank, images))
        images = [name for name in images if rank(name) == best]
        if len(images) > 1:
            raise UserError(
                f"{self.path(near)}: {given} may be {images[0]} or {images[1]}; remove or rename "
                "one of them"
            )
        image = images[0]
        other = self.given_of.setdefault(image, given)
        if not may_be_same(given, other):
            raise UserError(
                f"{self.path(near)}: {other} and {given} are two images, but {image} is the only "
                "one there; put the images into the folders that the labels name"
            )
        return self.path(image)

    def named_as(self, given: str) -> list[str]:
        """Return the images in any folder that have the name of `given`, with or without ending."""
        last = seen(slashes(given).rpartition("/")[2])
        # the second is for x.tif as x.png, after somebody has saved the images anew
        images = self.images_by_name
        return images.get(last) or images.get(without_ending(last), [])

    def image_column(self, path: Path, rows: Rows) -> str:
        """Return the column of a table whose cells name images that are there, else the first one.

        path: of the table. Raises a UserError if two columns name images otherwise.
        """
        # by column: the image of each row, or ""; how well these are names
        names_of: dict[str, list[str]] = {}
        rank_of: dict[str, tuple[bool, int]] = {}
        for column in filter(None, rows[0][1]):
            if ending_of(column) in ENDINGS and self.named_as(column):
                raise UserError(
                    f"{path}: its first line names an image; add a header with the column names"
                )
            cells = [slashes(str(row.get(column))) for _, row in rows]
            names = [cell if self.named_as(cell) else "" for cell in cells]
            # 1.jpg is a name, where 1 may be any number; 0 and 1 are answers, too
            has_endings = any(ending_of(name) in ENDINGS for name in names)
            names_of[column] = names
            rank_of[column] = (has_endings, len({*names} - {"", "0", "1"}))
        best = max(rank_of, key=rank_of.__getitem__, default="")
        for column, names in names_of.items():
            has_endings, count = rank_of[column]
            # some ages are names by chance
            is_chance = not has_endings and 2 * count <= rank_of[best][1]
            if is_chance or has_endings < rank_of[best][0]:
                continue
            for one, other in zip(names_of[best], names, strict=True):
                if one and other and not may_be_same(one, other):
                    raise UserError(
                        f"{path}: {best} and {column} may each name the images, {one} and {other} "
                        "in one row; remove the wrong column, or write the endings of the files "
                        "in the right one; if one is of masks, call the file train.csv, and the "
                        "columns image and mask, which training reads"
                    )
        return best

    def refuse_outside(self, path: Path, near: str) -> None:
        """Raise a UserError of a path that `near` names beyond the source, of whatever is there."""
        if not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(self.root)):
            raise UserError(
                f"{self.path(near)}: names {path}, outside of {self.root}; copy the images into "
                "it, or name the folder around both"
            )

    def may_be(self, name: str, given: str, near: str, part: str) -> bool:
        """Return whether an image of the right name lies where `given` and `part` say."""
        own = folder_of(name)
        folder = folder_of(given)
        same = common_end(name, given)
        if folder and same > len(folder.split("/")):
            return True  # all that is given
        named = part_of(folder)
        lies_in = part_of(own)
        if named and named != lies_in and (lies_in or named in self.parts):
            return False
        # of lists of parts for images that are all in one folder named train
        is_pool = self.parts == {"train"}
        # folders that the label file lies in, too, say nothing
        lies_in = part_of(os.path.relpath(own or ".", folder_of(near) or "."))
        if part and lies_in and part != lies_in and not is_pool:
            return False
        rest = special_names(folder, same)
        own_rest = special_names(own, same)
        return not rest or not own_rest or bool(rest & own_rest)

    @functools.cached_property
    def names(self) -> set[str]:
        return set(self.files)

    @functools.cached_property
    def parts(self) -> set[str]:
        """The parts that have folders of images of their own."""
        return {part_of(folder_of(name)) for name in self.in_folder("")} - {""}

    def count_unnamed(
        self,
        labelled: LabelledSet,
        others: Collection[str] = (),
        everywhere: bool = False,
    ) -> None:
        """Count the images beside those that have labels, which no label file names.

        others: files that are no images of the set. everywhere: also those of other folders.
        """
        used = {sample.image.resolve() for sample in labelled.samples}
        folders = {folder_of(self.below(sample.image)) for sample in labelled.samples}
        said = set(others).union(*labelled.skipped.names.values())
        for name in self.in_folder(""):
            is_counted = everywhere or folder_of(name) in folders
            is_known = name in said or self.path(name).resolve() in used
            if is_counted and not is_known:
                labelled.skipped.leave_out("images without labels", name)

    def keyed(self, folder: str) -> dict[str, str]:
        """Return the images of a folder by their paths in it, without endings; each has its own."""
        names = self.in_folder(folder)
        return folders.index_by_name([(name, key_of(name, folder)) for name in names])

    @functools.cached_property
    def jsons(self) -> dict[str, Json]:
        """What the JSON files hold, by name; a UserError in place of one that is none."""
        contents: dict[str, Json] = {}
        for name in self.with_ending(".json"):
            try:
                content = files.parse(self.path(name), json.loads, "JSON")
            except UserError as error:
                content = error
            if isinstance(content, dict):
                content.pop("imageData", None)  # LabelMe's copy of the image
            contents[name] = content
        return contents

    def refuse_broken(self) -> None:
        """Raise a UserError if a JSON file could not be read."""
        for content in self.jsons.values():
            if isinstance(content, UserError):
                raise content

    def start_of(self, name: str) -> str:
        """Return the beginning of a file, as text of any encoding."""
        path = self.path(name)
        try:
            with files.open_file(path) as file:
                return file.read(MOST).decode("utf-8-sig", "replace")
        except OSError as error:
            raise files.failure(path, error, "read") from None

    def lines(self, name: str) -> list[str]:
        """Return the lines of a text file that are not empty, without blanks around them."""
        text = files.read_text(self.path(name))
        return list(filter(None, map(str.strip, text.splitlines())))

    def tables(self, name: str, column: str) -> list[str]:
        """Return the CSV files of that name in any folder, if their first row has the column."""
        return [
            path
            for path in self.files_named(name)
            if column in next(self.rough_rows(path), (0, {}))[1]
        ]

    def rough_rows(self, name: str) -> lists.Rows:
        """Yield the rows of a CSV file that may not be one of labels: of any encoding."""
        return lists.parse_rows(files.read_text(self.path(name), "replace"))


def ending_of(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def stem_of(name: str) -> str:
    return os.path.splitext(name.rpartition("/")[2])[0]


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def key_of(name: str, folder: str) -> str:
    """Return the path of a file in `folder`, without its ending."""
    return os.path.splitext(name[len(folder) :].lstrip("/"))[0]


def slashes(given: str) -> str:
    """Return a path with / and without ./ in front."""
    return given.replace("\\", "/").removeprefix("./")


def common_end(name: str, given: str) -> int:
    """Return how many of the last parts of two paths are equal; the last one counts as equal."""
    own = folder_of(seen(name)).split("/")
    other = folder_of(seen(given)).split("/")
    count = 1
    while own and other and own.pop() == other.pop() != "":
        count += 1
    return count


def may_be_same(one: str, other: str) -> bool:
    """Return whether two names may be of one file: one has fewer folders, or no ending."""
    if (ending_of(one) in ENDINGS) != (ending_of(other) in ENDINGS):
        one, other = map(without_ending, (one, other))
    short, long = sorted((f"/{one}", f"/{other}"), key=len)
    return long.endswith(short)


def without_ending(name: str) -> str:
    """Return the name of an image without its ending."""
    return os.path.splitext(name)[0] if ending_of(name) in ENDINGS else name


def special_names(folder: str, same: int) -> set[str]:
    """Return the folders in front of what two paths have in common that tell images apart.

    same: what `common_end` returns.
    """
    pieces = seen(folder).lower().split("/")
    rest = pieces[: len(pieces) - same + 1]
    return {each for each in rest if each not in USUAL and not part_of(each)}
