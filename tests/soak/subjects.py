"""What a soak tries, each with its share of the time."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import clusters
import damage
import edits
import files
import interrupts
import load
from setting import Setting

# a case: returns a line, raises what is wrong
Act = Callable[[random.Random, Path, Setting], str]


@dataclass(frozen=True)
class Subject:
    name: str
    act: Act
    share: float  # of the time
    seconds: float = 300  # that a case may take
    at_most: float = float("inf")  # cases of one soak


ALL = (
    Subject("interrupts", interrupts.case, share=10, seconds=600),
    Subject("damage", damage.case, share=2),
    Subject("files", files.case, share=2),
    Subject("masks", files.case_of_masks, share=1),
    Subject("edits", edits.case, share=4, seconds=600),
    Subject("clusters", clusters.case, share=3, seconds=600),
    Subject("many", load.many_ranks, share=1, seconds=600, at_most=1),
    Subject("memory", load.memory, share=4, seconds=1800, at_most=1),
)
