"""Ranks that wait for rank 0 for longer than collectives would."""

import time

from ddpkit.ranks import distributed

distributed.setup(timeout=3)
for seconds in (4, 0):
    assert distributed.await_rank_zero(lambda s: time.sleep(s) or s, seconds) == seconds
distributed.teardown()
