"""Waits for a name that is known, and for a second for one that is not."""

from engine.ranks.environment import wait_for_name
from engine.ranks.failures import one_line_errors

with one_line_errors():
    wait_for_name("localhost")
    wait_for_name("nowhere.invalid", seconds=1)
