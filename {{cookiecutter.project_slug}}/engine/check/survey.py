"""What check_data.py reads: every file of a data set, once; and what is wrong with them."""

import contextlib
import hashlib
import io
import random
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from engine import files
from engine.data import bit_depth
from engine.data.format import Format
from engine.data.images import ORIENTATION, LazyImage, open_image
from engine.data.samples import Packed
from engine.errors import UserError, shorten
from engine.ranks import process

PARTS = ("train", "val")
KINDS = {  # of findings
    "layout": "folders that training refuses",
    "broken": "files that cannot be read",
    "no mask": "images without a mask",
    "no image": "masks without an image",
    "size": "masks of another size than their image",
    "label": "masks with values that are no class",
    "range": "images that need another value_range in data.json",
    "rotation": "pairs of which EXIF turns only one",
    "leak": "the same image in train and in val",
    "label clash": "the same image with two labels",
    "twice": "the same image more than once in a part",
    "absent": "classes that never come",
    "imbalance": "rare classes",
}
WARNINGS = {"twice", "absent", "imbalance"}  # others are errors
UNUSABLE = {"broken", "size", "label", "range"}
KEPT = 12  # samples of each class that may be drawn
IMBALANCE = 100  # times


@dataclass(frozen=True)
class Finding:
    """Something that is wrong. kind: a key of KINDS. other: a second file."""

    kind: str
    file: str
    text: str = ""
    other: str = ""


@dataclass
class Facts:
    """What reading a sample has shown, without its pixels.

    kind: file format and mode. size: (height, width), upright; (0, 0) if it cannot be read. turn:
    the orientation in EXIF. pixels, target: digests; 0: unknown. moments: float64 (3, channels),
    the number of pixels and the sums of their values, 0 to 1, and squares. span: lowest and highest
    value, if there are more than 8 bits. counts: pixels of each value in the mask without void, or
    {class: 1}.
    """

    kind: str = "unknown"
    size: tuple[int, int] = (0, 0)
    turn: int = 1
    pixels: int = 0
    target: int = 0
    moments: np.ndarray | None = None
    span: tuple[float, float] | None = None
    counts: dict[int, int] = field(default_factory=dict)
    void: int = 0  # pixels
    findings: list[Finding] = field(default_factory=list)


def look(path: str, format: Format) -> Facts:
    """Read the image at `path`. Whatever is wrong with it becomes a finding."""
    facts = Facts()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about files that it can read
            deep = read_deep(path, format, facts)
            image = open_image(path, format)
            seen = np.ascontiguousarray(image.decode(1))
    except Exception as error:  # Pillow raises errors of many kinds for malformed files
        kind = "range" if facts.span and isinstance(error, UserError) else "broken"
        facts.findings.append(Finding(kind, path, reason(error, path)))
        return facts
    facts.size, facts.pixels = (image.height, image.width), digest(seen if deep is None else deep)
    flat = seen.reshape(-1, seen.shape[2])
    if seen.dtype == np.uint8:
        counts = np.array(Image.fromarray(seen).histogram()).reshape(3, 256)
        levels = np.arange(256) / 255
        sums = counts @ levels, counts @ levels**2
    else:
        sums = flat.sum(0, np.float64), np.square(flat, dtype=np.float64).sum(0)
    facts.moments = np.stack([np.full(flat.shape[1], len(flat), np.float64), *sums])
    return facts


def read_deep(path: str, format: Format, facts: Facts) -> np.ndarray | None:
    """Return the values in a file of more than 8 bits; fill in their span, and the file's kind."""
    values: np.ndarray | None = None
    if format.channels:
        values = bit_depth.read(path, format)
        facts.kind = f"{values.dtype} with {format.channels} channel{'s' * (format.channels > 1)}"
        values = None if values.dtype == np.uint8 else values
    else:
        data = files.read(path)
        with Image.open(io.BytesIO(data)) as image:
            kind = bit_depth.kind_of(image)
            facts.kind = f"{image.format} {image.mode}" + (f" ({kind})" if kind else "")
            if kind:
                format.check_size(path, *image.size)
                with contextlib.suppress(UserError):  # open_image says what is wrong
                    values = bit_depth.read_values(path, image, data, format)
            facts.turn = image.getexif().get(ORIENTATION, 1)  # decodes a PNG, so it comes last
    if values is not None and np.isfinite(values).all():
        facts.span = float(values.min()), float(values.max())
    return values


def digest(values: np.ndarray) -> int:
    """Return a hash of the shape and the values, which is not 0."""
    found = hashlib.blake2b(repr(values.shape).encode(), digest_size=8)
    found.update(np.ascontiguousarray(values).data)
    return int.from_bytes(found.digest(), "little") | 1


def reason(error: Exception, path: str) -> str:
    """Return what is wrong with the file at `path`, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    text = " ".join(text.split()).removeprefix(f"{path}: ").removesuffix(f" {bit_depth.SET}")
    unread = re.fullmatch(r"cannot be read \((.*)\); replace or remove it", text)  # images.py's
    return unread[1] if unread else text


class Survey(Dataset):
    """What reading has shown of all samples, (path, class or mask, part): some bytes for each.

    values: that classes or pixels of masks may have. sizes: int32 (samples, 2), heights and widths;
    0 of those that training cannot use. pixels, images: int64 (2, values), of each class in each
    part. void: int64 (2,), pixels.
    """

    has_masks = False

    def __init__(
        self, root: Path, parts: Sequence[list], classes: Sequence[str], format: Format, values: int
    ) -> None:
        samples = [(*sample, n) for n, part in enumerate(parts) for sample in part]
        self.root, self.classes, self.format = root, classes, format
        self.samples, self.findings = Packed(samples), list[Finding]()
        self.parts = np.array([sample[-1] for sample in samples], np.uint8)
        self.sizes = np.zeros((len(samples), 2), np.int32)
        self.targets = np.zeros(len(samples), np.uint64)  # digests
        self.highest = np.full(len(samples), -1, np.int16)  # class
        self.pixels, self.images = (np.zeros((2, values), np.int64) for _ in range(2))
        self.void = np.zeros(2, np.int64)
        self.moments: np.ndarray | None = None  # of training images
        self.kinds: Counter[str] = Counter()
        self.spans: dict[str, tuple[int, float, float]] = {}  # images, lowest, highest
        self.first: dict[int, int] = {}  # sample, by the digest of its pixels
        self.kept: dict[int, list[int]] = {}  # samples of each class, at random
        self.random = random.Random(0)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Facts:
        path, label, _ = self.samples[index]
        facts = look(path, self.format)
        facts.counts, facts.target = {label: 1}, label + 1
        return facts

    def open(self, sample: tuple) -> tuple[LazyImage, LazyImage | None]:
        """Return an image and its mask, for check.png."""
        return open_image(sample[0], self.format), None

    def read(self, workers: int) -> None:
        """Read all samples in so many processes."""
        loader = DataLoader(
            self,
            batch_size=None,
            num_workers=workers,
            worker_init_fn=process.start_worker,
            multiprocessing_context=process.worker_context(workers),
        )
        for index, facts in enumerate(tqdm(loader, unit="sample", disable=None)):
            self.add(index, facts)

    def add(self, index: int, facts: Facts) -> None:
        part = int(self.parts[index])
        self.findings += facts.findings
        self.kinds[facts.kind] += 1
        if facts.span:
            count, low, high = self.spans.get(facts.kind, (0, np.inf, -np.inf))
            self.spans[facts.kind] = count + 1, min(low, facts.span[0]), max(high, facts.span[1])
        if part == 0 and facts.moments is not None:
            self.moments = facts.moments + (0 if self.moments is None else self.moments)
        self.void[part] += facts.void
        self.highest[index] = max(facts.counts, default=-1)
        is_usable = not {finding.kind for finding in facts.findings} & UNUSABLE
        self.sizes[index] = facts.size if is_usable else 0
        for value, pixels in facts.counts.items():
            self.pixels[part, value] += pixels
            self.images[part, value] += 1
            kept = self.kept.setdefault(value, [])
            place = self.random.randrange(int(self.images[:, value].sum()))
            if is_usable and len(kept) < KEPT:
                kept.append(index)
            elif is_usable and place < KEPT:
                kept[place] = index
        self.targets[index] = facts.target
        first = self.first.setdefault(facts.pixels, index) if facts.pixels else index
        if first != index:  # its pixels equal those of a sample before
            kinds = ["leak"] if self.parts[first] != part else []
            targets = {int(self.targets[first]), facts.target}
            kinds += ["label clash"] if len(targets) > 1 and 0 not in targets else []
            paths = self.samples[index][0], "", self.samples[first][0]
            self.findings += [Finding(kind, *paths) for kind in kinds or ["twice"]]

    def usable(self, part: int) -> np.ndarray:
        """Return the numbers of the samples of a part that training can use."""
        return np.flatnonzero((self.parts == part) & (self.sizes[:, 0] > 0))

    def channels(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation per channel over all pixels of the training images, in 0..1."""
        assert self.moments is not None
        mean, square = self.moments[1:] / self.moments[0]
        return mean, np.sqrt(np.maximum(square - mean**2, 0))

    def find_rare(self) -> None:
        """Add findings of classes that never come, or much more rarely than others in training."""
        classes, root = self.classes, str(self.root)
        for part in np.unique(self.parts):
            counts = self.images[part, : len(classes)]
            absent = [name for name, count in zip(classes, counts, strict=True) if not count]
            if 0 < len(absent) < len(counts):  # or nothing could be read
                never = f"{len(absent)} of {len(classes)} never come in {PARTS[part]}"
                self.findings.append(Finding("absent", root, f"{never}: {shorten(absent)}"))
        counts = self.images[0, : len(classes)]
        if len(some := counts[counts > 0]) and some.max() > IMBALANCE * some.min():
            rare, most = (classes[int(np.argmax(counts == n))] for n in (some.min(), some.max()))
            text = f"{rare} is in {some.min()} training images, {most} in {some.max()}"
            self.findings.append(Finding("imbalance", root, text))
