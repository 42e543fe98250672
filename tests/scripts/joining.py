"""A rank that joins the others, says how many there are, and leaves."""

from engine.ranks import process

process.install_handlers()
from engine.ranks import distributed  # noqa: E402

distributed.setup()
distributed.say(f"{distributed.world_size()} rank(s)")
distributed.teardown()
