"""Hides packages that the tests need and projects do not, from the Pythons that tests start.

torchmetrics imports them where they are, which is a quarter of the time in which main.py starts.
"""

import contextlib
import sys
from collections.abc import Iterator

NAMES = ("scipy", "transformers")


class Hidden:
    """A finder for sys.meta_path that lets no other one find these packages."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == "torchmetrics":  # which asks what is installed
            hide_metadata()


def hide_metadata() -> None:
    from importlib import metadata

    real = metadata.Distribution.from_name

    def from_name(name: str) -> metadata.Distribution:
        if name in NAMES:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    metadata.Distribution.from_name = from_name  # type: ignore[method-assign]


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """They are not found in this block."""
    from importlib import metadata

    known = vars(metadata.Distribution)["from_name"]
    finder = Hidden()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        metadata.Distribution.from_name = known  # type: ignore[method-assign]


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Hidden())  # type: ignore[arg-type]
