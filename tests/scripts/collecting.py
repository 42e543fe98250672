"""The garbage collector rests while a script imports, then works on."""

import gc
import weakref

from engine.ranks import process

process.install_handlers()
assert not gc.isenabled()

from engine.ranks import failures  # noqa: E402


class Part:
    def __init__(self) -> None:
        self.itself = self


with failures.one_line_errors():
    assert gc.isenabled()
    gone = weakref.ref(Part())
    kept = [[] for _ in range(10**5)]
    assert gone() is None
