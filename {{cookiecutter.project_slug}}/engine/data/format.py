"""How image files become pixels, and pixels what the network gets: DIR/data.json."""

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, tensor

from engine import files
from engine.errors import UserError

NAME = "data.json"
# ImageNet's channel means and deviations, in RGB order and units of 0..1: what the pretrained
# weights of torchvision and segmentation-models-pytorch expect.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Format:
    """The keys of data.json.

    value_range: which values become 0 and 255 in images of more than 8 bits; None: 0 to 65535 for
    16 bits, 0 to 1 for floats, and images that would be nearly black are refused.
    max_megapixels: larger images are refused, because a small file may claim any size.
    channels: None for RGB of 8 bits; with a number images have their files' full depth, as float32.
    mean, std: of each channel, in units of 0..1; None: ImageNet's.
    """

    value_range: Sequence[float] | None = None
    max_megapixels: int = 179
    channels: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    @functools.cached_property  # asked for at every step
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each channel; a UserError if they are not known."""
        count = self.channels or 3
        found = []
        for name, given, default in ("mean", self.mean, MEAN), ("std", self.std, STD):
            if given is None and count not in (1, 3):
                raise UserError(
                    f'{NAME}: "channels": {count} needs "{name}", {count} numbers; '
                    "check_data.py DIR --write adds them"
                )
            found.append(tuple(given or (default if count == 3 else (sum(default) / 3,))))
        return found[0], found[1]

    def normalize(self, image: Tensor) -> Tensor:
        """Return a float image (channels, H, W), 0 to 1, with about zero mean and unit deviation.

        Without "channels" images are uint8 (3, H, W), and stay: the device normalises those.
        """
        if not self.channels:
            return image
        mean, std = (tensor(values).view(-1, 1, 1) for values in self.statistics)
        return (image - mean) / std

    def check_size(self, path: str, width: int, height: int) -> None:
        """Raise a UserError if an image of so many pixels is larger than allowed."""
        if width * height > self.max_megapixels * 1e6:
            raise UserError(
                f"{path}: {width} x {height} pixels are more than max_megapixels, "
                f'{self.max_megapixels}; shrink it, or write "max_megapixels": '
                f"{math.ceil(width * height / 1e6)} into {NAME}"
            )

    def keys(self) -> dict[str, object]:
        """Return what data.json has to say, without defaults."""
        given, defaults = asdict(self), asdict(DEFAULT_FORMAT)
        return {name: value for name, value in given.items() if value != defaults[name]}

    @property
    def range_text(self) -> str:
        if not self.value_range:
            return "no value_range"
        return "value_range [{:.9g}, {:.9g}]".format(*self.value_range)


DEFAULT_FORMAT = Format()


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _are_numbers(value: object, least: float = -math.inf) -> bool:
    def is_number(each: object) -> bool:
        return isinstance(each, int | float) and type(each) is not bool and least < each < math.inf

    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def _is_range(value: object) -> bool:
    if not isinstance(value, list) or not _are_numbers(value) or len(value) != 2:
        return False
    low, high = value
    return bool(low < high)


RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "value_range": (_is_range, "[LOW, HIGH], two numbers with LOW < HIGH"),
    "max_megapixels": (_is_count, "an integer of 1 or more"),
    "channels": (_is_count, "an integer of 1 or more"),
    "mean": (_are_numbers, "a list of numbers"),
    "std": (functools.partial(_are_numbers, least=0), "a list of numbers above 0"),
}


def read_format(folder: Path) -> Format:
    """Return what `folder`/data.json says, the defaults without it; a UserError names a mistake."""
    path = folder / NAME
    try:
        found = json.loads(files.read(path).decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return DEFAULT_FORMAT
    except OSError as error:
        raise files.failure(path, error, "read") from None
    except ValueError as error:  # of JSON, or of UTF-8
        raise UserError(f"{path}: not JSON ({error}); correct it, or remove it") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object; expected such as " + '{"channels": 5}')
    for name, value in found.items():
        if name not in RULES:
            raise UserError(f'{path}: unknown key "{name}"; the keys are {", ".join(RULES)}')
        if not RULES[name][0](value):
            raise UserError(f'{path}: "{name}": {json.dumps(value)}: expected {RULES[name][1]}')
    count = found.get("channels", 3)
    for name in "mean", "std":
        if name in found and len(found[name]) != count:
            raise UserError(f'{path}: "{name}": {len(found[name])} numbers for {count} channels')
    lists = {name: tuple(each) for name, each in found.items() if isinstance(each, list)}
    return Format(**{**found, **lists})


def write_format(folder: Path, format: Format) -> None:
    """Write `folder`/data.json; remove it if `format` is the default."""
    path = folder / NAME
    if not format.keys():
        return path.unlink(missing_ok=True)
    with files.writing(path) as tmp_path:
        tmp_path.write_text(json.dumps(format.keys()) + "\n")
