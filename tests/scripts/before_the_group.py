"""Ranks that fail before they are in a group: rank 0 after the others, or last of all."""

import sys
import time

from ddpkit.ranks import process

process.install_handlers()
from ddpkit.errors import UserError  # noqa: E402
from ddpkit.ranks import distributed, failures  # noqa: E402

seconds = float(sys.argv[1])  # for which rank 0 waits for the others
with failures.one_line_errors():
    if distributed.rank() == 0:
        if seconds:
            distributed.setup(timeout=seconds)
        time.sleep(2)
    raise UserError(f"planted in rank {distributed.rank()}")
