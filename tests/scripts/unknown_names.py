"""Waits for a name that is known, and for a second for one that is not."""

from engine.ranks import distributed

with distributed.one_line_errors():
    distributed.wait_for_name("localhost")
    distributed.wait_for_name("nowhere.invalid", seconds=1)
