"""Which mask belongs to which image, by their names: both NAME, or NAME and NAME_mask.

Names that differ are paired if one rule fits all images and all masks of a part, and no other rule
pairs them otherwise.
"""

import bisect
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpkit.errors import UserError

TRIED = 4  # rules of a kind: those that most names suggest
LETTER = re.compile(r"[^\W\d_]")
# a word of which two names share the beginning, and what is before it
BEGUN_WORD = re.compile(r"[\W_]*[^\W\d_]*$")


class Rule(NamedTuple):
    """How the names of images and masks differ.

    image, mask: what they have besides NAME, which is the same in both; at their beginning if
    is_first, otherwise at their end. is_folded: whether small letters are the same as capital ones,
    and letters the same in each form of Unicode.
    is_whole: NAME is the image's with the ending of its file, as in NAME.jpg.png.
    """

    image: str = ""
    mask: str = ""
    is_first: bool = False
    is_folded: bool = False
    is_whole: bool = False

    def describe(self) -> str:
        """Return what the rule is, for a line; nothing if names are equal."""
        found = []
        for kind, part in ("images", self.image), ("masks", self.mask):
            if part:
                form = f"{part}NAME" if self.is_first else f"NAME{part}"
                found.append(f"{kind} are named {form}")
        if self.is_whole:
            found.append(
                "masks are named as the files of the images, such as NAME.jpg.png"
            )
        if self.is_folded:
            found.append(
                "small and capital letters and the forms of Unicode are taken for the same"
            )
        return " and ".join(found)

    def base_of(self, name: str, part: str) -> str:
        """Return NAME in `name`, which has `part` besides; nothing if that cannot be."""
        if self.is_folded:
            name = fold(name)
            part = fold(part)
        folder, file = os.path.split(name)
        if self.is_first:
            rest = file.removeprefix(part)
            edge = part[-1:] + rest[:1]
        else:
            rest = file.removesuffix(part)
            edge = rest[-1:] + part[:1]
        is_without = len(rest) + len(part) > len(file)
        # 10 is another number than 1, not 1 and a 0 behind it
        is_in_number = len(edge) == 2 and edge.isdecimal()
        if not rest or is_without or is_in_number:
            return ""
        return os.path.join(folder, rest)


class Matched(NamedTuple):
    """Names of images with those of their masks; and the names without the other."""

    pairs: dict[str, str]
    images: Sequence[str]
    masks: Sequence[str]
    rule: Rule


def match_names(image_of: Mapping[str, str], mask_of: Mapping[str, str]) -> Matched:
    """Return which mask each image has, by the rule that pairs most; the paths are given by name.

    Raises a UserError if a rule fits all names, but some also in another way.
    """
    equal = pair_by(Rule(), image_of, mask_of)
    best = equal
    for is_folded in False, True:
        if not best.images and not best.masks:
            break
        for rule in suggest_rules(image_of, mask_of, is_folded):
            found = pair_by(rule, image_of, mask_of)
            if not found.images and not found.masks:
                refuse_doubt(found, [equal, best], image_of, mask_of)
            if len(found.pairs) > len(best.pairs):
                best = found
    return best


def refuse_doubt(
    found: Matched,
    others: Iterable[Matched],
    image_of: Mapping[str, str],
    mask_of: Mapping[str, str],
) -> None:
    """Raise a UserError if equal names, or another rule that fits, pair otherwise than `found`."""
    for other in others:
        if other.rule != Rule() and (other.images or other.masks):
            continue
        for image, mask in other.pairs.items():
            if found.pairs[image] != mask:
                raise UserError(
                    f"{image_of[image]}: its mask may be {mask_of[mask]} or "
                    f"{mask_of[found.pairs[image]]}; give both the same name"
                )


def pair_by(
    rule: Rule, image_of: Mapping[str, str], mask_of: Mapping[str, str]
) -> Matched:
    """Return the pairs of a rule; none if two images or two masks have the same NAME."""
    images: dict[str, list[str]] = {}
    for name, path in image_of.items():
        whole = name + os.path.splitext(path)[1] if rule.is_whole else name
        images.setdefault(rule.base_of(whole, rule.image), []).append(name)
    masks: dict[str, list[str]] = {}
    for name in mask_of:
        masks.setdefault(rule.base_of(name, rule.mask), []).append(name)
    pairs: dict[str, str] = {}
    for base in sorted(images.keys() & masks.keys() - {""}):
        if len(images[base]) == len(masks[base]) == 1:
            pairs[images[base][0]] = masks[base][0]
    images_left = sorted(image_of.keys() - pairs.keys())
    masks_left = sorted(mask_of.keys() - set(pairs.values()))
    return Matched(pairs, images_left, masks_left, rule)


def suggest_rules(
    images: Iterable[str], masks: Iterable[str], is_folded: bool
) -> Iterator[Rule]:
    """Yield rules that may fit; each image's name and the masks' next to it suggest one."""
    if not is_folded:
        yield Rule(is_folded=True)
    yield Rule(is_folded=is_folded, is_whole=True)
    for is_first in False, True:
        sides = []
        for names in images, masks:
            files = [os.path.basename(name) for name in names]
            if is_folded:
                files = [fold(file) for file in files]
            if is_first:  # from behind
                files = [file[::-1] for file in files]
            sides.append(sorted(files))
        votes: Counter[tuple[str, str]] = Counter()
        for file in sides[0]:
            at = bisect.bisect(sides[1], file)
            for near in sides[1][max(at - 1, 0) : at + 1]:
                votes[rests(file, near)] += 1
        for (image, mask), _ in votes.most_common(TRIED):
            # numbers alone may be those of other images
            if all(LETTER.search(part) for part in (image, mask) if part):
                step = -1 if is_first else 1
                yield Rule(image[::step], mask[::step], is_first, is_folded)


def fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).lower()


def rests(image: str, mask: str) -> tuple[str, str]:
    """Return what two names have after what is the same in them, from the beginning of a word."""
    length = 0
    for one, other in zip(image, mask, strict=False):
        if one != other:
            break
        length += 1
    same = image[:length]
    if len(same) < min(len(image), len(mask)):
        same = BEGUN_WORD.sub("", same) or same
    return image[len(same) :], mask[len(same) :]
