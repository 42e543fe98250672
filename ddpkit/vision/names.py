"""Names as people see them: two that look the same are one name to a person, but two in a file."""

import unicodedata
from collections.abc import Iterable

from ddpkit.errors import UserError

DIFFER = "have other Unicode forms (NFC, NFD), blanks or invisible letters"
MOST_LETTERS = 255  # of a class name, as of a folder


def seen(name: str) -> str:
    """Return a name without what nobody sees: Unicode forms, invisible letters, kinds of blanks."""
    if not name.isascii():
        shown = [each for each in name if unicodedata.category(each) != "Cf"]
        name = unicodedata.normalize("NFC", "".join(shown))
    return " ".join(name.split())


def hint_at_look(name: str, others: Iterable[str]) -> str:
    """Return a remark if one of `others` looks the same as a name that is none of them."""
    if any(seen(name) == seen(each) for each in others if each != name):
        return f"; there is one that looks the same, but they {DIFFER}: rename it"
    return ""


def refuse_alike(names: Iterable[str], where: object) -> None:
    """Raise a UserError if two names of classes look the same, or if one is endless."""
    first: dict[str, str] = {}
    for name in names:
        if len(name) > MOST_LETTERS:
            raise UserError(
                f"{where}: the class {name[:40]} ... has {len(name):,} letters in its name, more "
                f"than {MOST_LETTERS}; shorten it"
            )
        shown = seen(name)
        if not shown:
            raise UserError(
                f"{where}: the class {name!a} has no visible name; rename it"
            )
        other = first.setdefault(shown, name)
        if other != name:
            raise UserError(
                f"{where}: {other!a} and {name!a} look the same, but {DIFFER}; rename one"
            )
