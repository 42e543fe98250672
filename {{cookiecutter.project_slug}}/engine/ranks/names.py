"""What a rank is called in messages: with its node, if there are others."""

import os

from engine.ranks import environment


def has_other_nodes() -> bool:
    """Return whether this rank's launcher tells of ranks on other nodes."""
    size, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return size.isdecimal() and here.isdecimal() and int(size) > int(here)


def own_rank() -> str:
    """Return such as "rank 3", or "rank 3 on n2" if there are other nodes."""
    rank = f"rank {os.environ.get('RANK', 0)}"
    return f"{rank} on {environment.node()}" if has_other_nodes() else rank
