"""What main.py makes of flags."""

import main


def image_size(*words: str) -> int | None:
    return main.parse_args(list(words)).image_size
