"""Takes the place of main.py where only the start is tried: the ranks meet and are counted."""

from ddpkit.ranks import process

process.install_handlers()
import torch  # noqa: E402

from ddpkit.ranks import distributed, failures  # noqa: E402

with failures.one_line_errors():
    distributed.setup()
    count = int(distributed.reduce_tensor(torch.ones(1)))
    distributed.say(f"{count} rank(s) have met")
    distributed.teardown()
