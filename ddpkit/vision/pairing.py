"""Which mask belongs to which image, by their names: both NAME, or NAME and NAME_mask.

Names that differ are paired if one rule fits all images and all masks of a part, and no other rule
pairs them otherwise.
"""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ddpkit.errors import UserError

LETTER = re.compile(r"[^\W\d_]")
# a word of which two endings share the beginning, and what is before it
BEGUN_WORD = re.compile(r"[\W_]*[^\W\d_]*$")
Names = Mapping[str, str]  # the paths of files, by their names


class Rule(NamedTuple):
    """How the names of images and masks differ.

    image, mask: what they have besides NAME, which is the same in both, at their end; if is_first
    at their beginning, from right to left. is_folded: whether small letters are the same as capital
    ones, and letters the same in each form of Unicode.
    """

    image: str = ""
    mask: str = ""
    is_first: bool = False
    is_folded: bool = False

    def describe(self) -> str:
        """Return what the rule is, for a line; nothing if names are equal."""
        found = []
        for kind, own in ("images", self.image), ("masks", self.mask):
            if own:
                form = f"{own[::-1]}NAME" if self.is_first else f"NAME{own}"
                found.append(f"{kind} are named {form}")
        if self.is_folded:
            found.append(
                "small and capital letters and the forms of Unicode are taken for the same"
            )
        return " and ".join(found)

    def spell(self, name: str) -> str:
        """Return a name as the rule looks at it: what names have of their own is at its end."""
        folder, file = os.path.split(fold(name) if self.is_folded else name)
        return os.path.join(folder, file[::-1] if self.is_first else file)

    def group(
        self,
        names: Names,
        own: str,
    ) -> dict[str, list[str]]:
        """Return the names by their NAME, of those that have `own` besides."""
        found: dict[str, list[str]] = {}
        for name in names:
            spelled = self.spell(name)
            rest = spelled.removesuffix(own)
            # 10 is another number than 1, not 1 and a 0 behind it
            is_in_number = own[:1].isdecimal() and rest[-1:].isdecimal()
            if rest + own != spelled or is_in_number:
                continue
            if os.path.basename(rest):
                found.setdefault(rest, []).append(name)
        return found

    def pair(
        self,
        image_of: Names,
        mask_of: Names,
    ) -> dict[str, str]:
        """Return the mask of each image; none if two images or two masks have the same NAME."""
        masks = self.group(mask_of, self.mask)
        pairs = {}
        for base, images in self.group(image_of, self.image).items():
            others = masks.get(base, [])
            if len(images) == len(others) == 1:
                pairs[images[0]] = others[0]
        return pairs


def match_names(
    image_of: Names,
    mask_of: Names,
) -> tuple[dict[str, str], Rule]:
    """Return which mask each image has, by the rule that pairs most, and that rule.

    Raises a UserError if a rule fits all names, but equal names, or another such rule, pair some
    of them otherwise.
    """
    best = Rule()
    pairs = best.pair(image_of, mask_of)
    others = [pairs]
    for is_folded in False, True:
        if len(pairs) == len(image_of) == len(mask_of):
            break
        for rule in suggest_rules(image_of, mask_of, is_folded):
            found = rule.pair(image_of, mask_of)
            if len(found) == len(image_of) == len(mask_of):
                for other in others:
                    refuse_doubt(found, other, image_of, mask_of)
                others.append(found)
            if len(found) > len(pairs):
                best = rule
                pairs = found
    return pairs, best


def refuse_doubt(
    found: Names,
    other: Names,
    image_of: Names,
    mask_of: Names,
) -> None:
    """Raise a UserError if an image has one mask in `found`, and another one in `other`."""
    for image, mask in other.items():
        if found[image] != mask:
            raise UserError(
                f"{image_of[image]}: its mask may be {mask_of[mask]} or "
                f"{mask_of[found[image]]}; give both the same name"
            )


def suggest_rules(
    images: Names,
    masks: Names,
    is_folded: bool,
) -> Iterator[Rule]:
    """Yield rules that may fit: by what most names have at their end, or at their beginning."""
    if not is_folded:
        yield Rule(is_folded=True)
    for is_first in False, True:
        plain = Rule(is_first=is_first, is_folded=is_folded)
        own = rests(common_end(images, plain), common_end(masks, plain))
        # numbers alone may be those of other images
        if all(LETTER.search(text) for text in own if text):
            yield plain._replace(image=own[0], mask=own[1])


def fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).lower()


def common_end(
    names: Names,
    rule: Rule,
) -> str:
    """Return what at least half of the names end with, as the rule spells them.

    Of images and masks that differ by one ending, what is in front of it is the same.
    """
    files = [os.path.basename(rule.spell(name)) for name in names]
    end = ""
    while True:
        letters = Counter(file[: len(file) - len(end)][-1:] for file in files)
        letter = max(letters, key=lambda each: (letters[each], each), default="")
        if not letter or 2 * letters[letter] < len(names):
            return end
        end = letter + end
        files = [file for file in files if file.endswith(end)]


def rests(
    image: str,
    mask: str,
) -> tuple[str, str]:
    """Return what two endings have after what is the same in them, from the beginning of a word."""
    length = 0
    for one, other in zip(image, mask, strict=False):
        if one != other:
            break
        length += 1
    same = image[:length]
    if length < min(len(image), len(mask)):
        same = BEGUN_WORD.sub("", same)
    return image[len(same) :], mask[len(same) :]
