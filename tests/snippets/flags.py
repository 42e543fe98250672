"""What flags.py makes of flags."""

import flags


def image_size(*words: str) -> int:
    return flags.parse_args(list(words)).image_size
