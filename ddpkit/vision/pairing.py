"""Which mask belongs to which image, by their names: both NAME, or NAME and NAME_mask.

Names that differ are paired if one rule fits all images and all masks of a part, and no other rule
pairs them otherwise. Small letters are then the same as capital ones, and letters the same in each
form of Unicode.
"""

import os
import re
import unicodedata
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
    at their beginning, from right to left.
    """

    image: str = ""
    mask: str = ""
    is_first: bool = False

    def describe(self) -> str:
        """Return what the rule is, for a line; nothing if names are equal."""
        forms = []
        for kind, own in ("images", self.image), ("masks", self.mask):
            if own:
                form = f"{own[::-1]}NAME" if self.is_first else f"NAME{own}"
                forms.append(f"{kind} are named {form}")
        return " and ".join(forms)

    def spell(self, name: str) -> str:
        """Return a name as the rule looks at it: what names have of their own is at its end."""
        folder, file = os.path.split(unicodedata.normalize("NFC", name).lower())
        return os.path.join(folder, file[::-1] if self.is_first else file)

    def group(self, names: Names, own: str) -> dict[str, list[str]]:
        """Return the names by their NAME, of those that have `own` besides."""
        groups: dict[str, list[str]] = {}
        for name in names:
            spelled = self.spell(name)
            rest = spelled.removesuffix(own)
            # 10 is another number than 1, not 1 and a 0 behind it
            is_in_number = own[:1].isdecimal() and rest[-1:].isdecimal()
            if rest + own == spelled and os.path.basename(rest) and not is_in_number:
                groups.setdefault(rest, []).append(name)
        return groups

    def pair(self, image_of: Names, mask_of: Names) -> dict[str, str]:
        """Return the mask of each image; none if two images or two masks have the same NAME."""
        masks = self.group(mask_of, self.mask)
        pairs = {}
        for base, images in self.group(image_of, self.image).items():
            others = masks.get(base, [])
            if len(images) == len(others) == 1:
                pairs[images[0]] = others[0]
        return pairs


def match_names(image_of: Names, mask_of: Names) -> tuple[dict[str, str], Rule]:
    """Return which mask each image has, by the rule that pairs most, and that rule.

    Raises a UserError if a rule fits all names, but equal names, or another such rule, pair some
    of them otherwise.
    """
    best = Rule()
    pairs = {name: name for name in image_of if name in mask_of}
    if len(pairs) == len(image_of) == len(mask_of):
        return pairs, best
    others = [pairs]
    for rule in suggest_rules(image_of, mask_of):
        paired = rule.pair(image_of, mask_of)
        if len(paired) == len(image_of) == len(mask_of):
            for other in others:
                refuse_doubt(paired, other, image_of, mask_of)
            others.append(paired)
        if len(paired) > len(pairs):
            best = rule
            pairs = paired
    return pairs, best


def refuse_doubt(paired: Names, other: Names, image_of: Names, mask_of: Names) -> None:
    """Raise a UserError if an image has one mask in `paired`, and another one in `other`."""
    for image, mask in other.items():
        if paired[image] != mask:
            raise UserError(
                f"{image_of[image]}: its mask may be {mask_of[mask]} or "
                f"{mask_of[paired[image]]}; give both the same name"
            )


def suggest_rules(images: Names, masks: Names) -> Iterator[Rule]:
    """Yield rules that may fit: by what most names have at their end, or at their beginning."""
    yield Rule()
    for is_first in False, True:
        plain = Rule(is_first=is_first)
        image = common_end(images, plain)
        mask = common_end(masks, plain)
        # Of images and masks that differ by one ending, what is before it is the same.
        same = common_start(image, mask)
        if same not in (image, mask):
            same = BEGUN_WORD.sub("", same)
        own = image.removeprefix(same), mask.removeprefix(same)
        # numbers alone may be those of other images
        if all(LETTER.search(text) for text in own if text):
            yield Rule(*own, is_first)


def common_end(names: Names, rule: Rule) -> str:
    """Return the longest text with which half of the names end, as the rule spells them."""
    files = sorted(os.path.basename(rule.spell(name))[::-1] for name in names)
    # Those that share it are neighbours, and the first and the last of neighbours share
    # what all of them do.
    later = files[(len(files) - 1) // 2 :]
    ends = map(common_start, files, later)
    return max(ends, key=len, default="")[::-1]


def common_start(one: str, other: str) -> str:
    while not other.startswith(one):
        one = one[:-1]
    return one
