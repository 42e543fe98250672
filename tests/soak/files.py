"""Folders and files as people, disks and programs leave them: what is trained on is what a plain
count says, nothing ends in a traceback, and a mask means the same however it is written.
"""

import csv
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from setting import Setting

import ddpkit
from ddpkit.errors import UserError
from ddpkit.vision import masks

LETTERS = "abcXYZ019 _-.,()[]{}'$%&=+@~äß漢字é😀"
KINDS = "png", "PNG", "jpg", "jpeg", "JPG", "bmp", "tif", "tiff", "webp"
# What disks and programs make beside images; nothing of it is a class or an image.
OF_DISKS = ["@eaDir", "#recycle", "#snapshot", "$RECYCLE.BIN", "lost+found"]
OF_DISKS += ["System Volume Information", ".Trash-1000", ".AppleDouble", "__MACOSX"]
OF_DISKS += [".ipynb_checkpoints"]
OTHERS = ["Thumbs.db", "desktop.ini", ".DS_Store", "notes.txt"]
OTHERS += ["a.json", "a.xml", ".hidden.png"]
BROKEN = [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a"]
BROKEN += [b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\0" * 99]


class Tree:
    """A folder that grows by chance, and a count of what it should be read as."""

    def __init__(self, chance: random.Random, root: Path) -> None:
        self.chance = chance
        self.root = root
        self.counts: dict[str, Counter[str]] = {}  # images by part and class
        self.broken: list[Path] = []

    def name(self) -> str:
        """A name that no other file here has."""
        text = "".join(self.chance.choices(LETTERS, k=self.chance.randrange(1, 12)))
        return f"{text.strip('. ') or 'x'}{self.chance.getrandbits(40):x}"

    def draw(self, path: Path) -> None:
        """Write an image that has no equal."""
        side = self.chance.randrange(8, 40)
        noise = np.frombuffer(self.chance.randbytes(side * side * 3), np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.reshape(side, side, 3)).save(path)

    def fill(self, part: str, kind: str, count: int) -> None:
        """Add so many images of a class, some in folders below it, and what is none."""
        folder = self.root / part / kind
        folder.mkdir(parents=True)
        for _ in range(count):
            below = [self.name() for _ in range(self.chance.choice([0, 0, 0, 1, 2]))]
            path = folder.joinpath(*below, f"{self.name()}.{self.chance.choice(KINDS)}")
            self.draw(path)
            if self.chance.random() < 0.05:
                path.write_bytes(self.chance.choice(BROKEN))
                self.broken.append(path)
        self.counts.setdefault(part, Counter())[kind] += count
        for clutter in self.chance.sample(CLUTTER, self.chance.randrange(3)):
            clutter(self, folder)


def beside(tree: Tree, folder: Path) -> None:
    """Folders of a disk or a program, with images in them."""
    path = folder / tree.chance.choice(OF_DISKS)
    tree.draw(path / "thumbnail.jpg")
    tree.draw(path / "below" / "thumbnail.png")


def other_files(tree: Tree, folder: Path) -> None:
    for name in tree.chance.sample(OTHERS, 3):
        (folder / name).write_bytes(tree.chance.randbytes(9))


def unread(tree: Tree, folder: Path) -> None:
    kind = tree.chance.choice(["psd", "svg", "mp4"])
    (folder / f"{tree.name()}.{kind}").touch()


def circle(tree: Tree, folder: Path) -> None:
    """A link to a folder above."""
    up = tree.chance.choice([folder, folder.parent, folder.parent.parent])
    (folder / tree.name()).symlink_to(up, target_is_directory=True)


def linked(tree: Tree, folder: Path) -> None:
    """A folder that lies elsewhere; it counts as if it lay here."""
    place = tree.root.parent / "elsewhere" / tree.name()
    for _ in range(2):
        tree.draw(place / f"{tree.name()}.png")
    (folder / tree.name()).symlink_to(place, target_is_directory=True)
    tree.counts[folder.parent.name][folder.name] += 2


CLUTTER: list[Callable[[Tree, Path], None]] = [
    beside,
    other_files,
    unread,
    circle,
    linked,
]


def case(chance: random.Random, folder: Path, setting: Setting) -> str:
    return chance.choice([class_folders, class_folders, lists])(chance, folder, setting)


def class_folders(chance: random.Random, folder: Path, setting: Setting) -> str:
    tree = Tree(chance, folder / "set")
    classes = [tree.name() for _ in range(chance.randrange(2, 5))]
    if chance.random() < 0.2:
        classes = [str(number) for number in chance.sample(range(20), 3)]
    parts = chance.choice([("train", "val"), ("train", "valid"), ("train",)])
    for part in parts:
        for kind in classes:
            tree.fill(part, kind, chance.randrange(3, 7))
    for clutter in beside, other_files:
        if chance.random() < 0.5:
            clutter(tree, tree.root / chance.choice(parts))
    try:
        train, val, names = ddpkit.find_classes(tree.root)
    except UserError as error:
        assert any(str(path) in str(error) for path in tree.broken), error
        return "the first image is broken"
    # as numbers if all are
    are_numbers = all(name.isdecimal() for name in classes)
    classes.sort(key=int if are_numbers else None)
    assert names == classes
    of_train = Counter(names[label] for _, label in train.samples)
    of_val = Counter(names[label] for _, label in val.samples)
    said = (of_train, of_val, tree.counts)
    if len(parts) == 2:
        assert [of_train, of_val] == [tree.counts[part] for part in parts], said
    else:
        assert of_train + of_val == tree.counts["train"], said
        for kind, count in tree.counts["train"].items():
            assert of_val[kind] == max(1, round(0.15 * count)), said
    check(tree, setting)
    return f"{dict(sum(tree.counts.values(), Counter()))}, {len(tree.broken)} broken"


def check(tree: Tree, setting: Setting) -> None:
    """`python -m ddpkit check` reads them all, and names what is broken."""
    project = setting.projects["classification"]
    done = project.run(tree.root, "--workers", 0, script="ddpkit check", on=1)
    assert "Traceback" not in done.err, done.err
    assert done.status == int(bool(tree.broken)), done.out + done.err
    errors = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(tree.broken), done.out


def lists(chance: random.Random, folder: Path, setting: Setting) -> str:
    """train.csv, as programs write it; a row that cannot be is refused in a line that names it."""
    tree = Tree(chance, folder / "set")
    classes = [tree.name() for _ in range(3)]
    rows = []
    wrong = chance.random() < 0.3
    for n in range(chance.randrange(9, 30)):
        path = tree.root / tree.name() / f"{tree.name()}.png"
        tree.draw(path)
        name = chance.choice([str(path), os.path.relpath(path, tree.root)])
        rows.append([name, classes[n % 3]])
    spoilt = chance.randrange(len(rows))
    if wrong:
        rows[spoilt][chance.randrange(2)] = ""
    with open(tree.root / "train.csv", "w", newline="", encoding="utf-8-sig") as file:
        write = csv.writer(file, lineterminator=chance.choice(["\n", "\r\n"])).writerow
        write(["file", "label"])
        for row in rows:
            write(row)
    try:
        train, val, names = ddpkit.find_classes(tree.root)
    except UserError as error:
        assert wrong, error
        assert "train.csv, line " in str(error), error
        return "a list with a wrong row"
    assert not wrong
    found = Counter(names[label] for part in (train, val) for _, label in part.samples)
    assert found == Counter(label for _, label in rows)
    return f"a list of {len(rows)} images"


def case_of_masks(chance: random.Random, folder: Path, setting: Setting) -> str:
    """One mask in all encodings that lose nothing: the same numbers, or an error."""
    told: Counter[str] = Counter()
    for _ in range(40):
        side = chance.randrange(4, 30), chance.randrange(4, 30)
        is_grey = chance.random() < 0.5
        names, shown, right, labels = picture(chance, side, is_grey)
        for write in ENCODINGS:
            path = write(chance, shown, folder)
            if path is None:
                continue
            try:
                found = masks.read_mask(str(path), labels)
            except UserError as error:
                assert path.name in str(error), error
                assert "\n" not in str(error), error
                told[f"{write.__name__} refused"] += 1
                continue
            both = f"{np.unique(found)} for {np.unique(right)}, {names}"
            assert np.array_equal(found, right), f"{write.__name__} {path.name}: {both}"
            told[write.__name__] += 1
    return ", ".join(f"{count} {name}" for name, count in sorted(told.items()))


def picture(
    chance: random.Random, side: tuple[int, int], is_grey: bool
) -> tuple[list[str], np.ndarray, np.ndarray, masks.Labels]:
    """Return the lines of classes.txt, what a mask shows (H, W, 3), its numbers, the Labels."""
    count = chance.randrange(2, 6)
    if is_grey:
        some = chance.sample(range(255), count)
        values = chance.choice([list(range(count)), some, [0, 255]])
        colors = [(value, value, value) for value in values]
        names = [f"class {n} = {value}" for n, value in enumerate(values)]
    else:
        colors = [tuple(chance.randbytes(3)) for _ in range(count)]
        names = [f"class {n} = {r} {g} {b}" for n, (r, g, b) in enumerate(colors)]
    numbers = np.frombuffer(chance.randbytes(side[0] * side[1]), np.uint8).reshape(side)
    right = (numbers % len(colors)).astype(np.uint8)
    shown = np.array(colors, np.uint8)[right]
    return names, shown, right, masks.parse(names, Path("classes.txt"))


Encoding = Callable[[random.Random, np.ndarray, Path], Path | None]


def as_rgb(chance: random.Random, shown: np.ndarray, folder: Path) -> Path:
    return save(Image.fromarray(shown), chance, folder)


def as_rgba(chance: random.Random, shown: np.ndarray, folder: Path) -> Path:
    image = Image.fromarray(shown).convert("RGBA")
    return save(image, chance, folder, "png", "tif")


def as_grey(chance: random.Random, shown: np.ndarray, folder: Path) -> Path | None:
    return save(Image.fromarray(shown[..., 0]), chance, folder) if grey(shown) else None


def as_grey_and_alpha(
    chance: random.Random, shown: np.ndarray, folder: Path
) -> Path | None:
    if not grey(shown):
        return None
    return save(Image.fromarray(shown[..., 0]).convert("LA"), chance, folder, "png")


def as_one_bit(chance: random.Random, shown: np.ndarray, folder: Path) -> Path | None:
    """As lossless optimisers write what is black and white."""
    if not grey(shown) or not set(np.unique(shown)) <= {0, 255}:
        return None
    return save(Image.fromarray(shown[..., 0] > 0), chance, folder, "png", "tif", "bmp")


def as_palette(chance: random.Random, shown: np.ndarray, folder: Path) -> Path:
    """With its colours in any order, as lossless optimisers write few of them."""
    colors, numbers = np.unique(shown.reshape(-1, 3), axis=0, return_inverse=True)
    order = chance.sample(range(len(colors)), len(colors))
    indices = np.array(order, np.uint8)[numbers].reshape(shown.shape[:2])
    table = np.zeros((len(colors), 3), np.uint8)
    table[order] = colors
    image = Image.fromarray(indices)
    image.putpalette(table.tobytes())
    return save(image, chance, folder, "png", "tif", "bmp")


ENCODINGS: list[Encoding] = [
    as_rgb,
    as_rgba,
    as_grey,
    as_grey_and_alpha,
    as_one_bit,
    as_palette,
]


def grey(shown: np.ndarray) -> bool:
    return bool((shown[..., :1] == shown).all())


def save(image: Image.Image, chance: random.Random, folder: Path, *kinds: str) -> Path:
    kind = chance.choice(kinds or ("png", "tif", "bmp", "webp"))
    path = folder / f"{zlib.crc32(image.tobytes())}.{kind}"
    compression = chance.choice(["raw", "tiff_lzw", "tiff_adobe_deflate"])
    more = {
        "png": {"optimize": chance.random() < 0.5},
        "webp": {"lossless": True, "exact": True},
        "tif": {"compression": compression},
    }
    image.save(path, **more.get(kind, {}))
    return path
