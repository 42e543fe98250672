"""Finds the lines of a training step that would make a GPU wait.

It trains on the CPU, where nothing waits, and notes who asks for the values of tensors.
"""

import functools
import inspect
import linecache
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit.run import loop

# Optimizer steps. In the first ones Run reads much; of the others there have to be some,
# for a line that reads now and then, such as every other time, to be told from one that
# always does.
FIRST = 3
FEWEST = 6
# Operators that read values: item(), float(), if; nonzero(), unique().
READ = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Methods that do without an operator if a tensor lies on the CPU.
METHODS = ("__repr__", "cpu", "numpy", "to", "tolist")


def find(main: ModuleType, words: Sequence[str]) -> str:
    """Return which line reads a value off the device in each step, and why that is slow; or "".

    main: main.py, of which `main.main(words)` trains for FEWEST optimizer steps or more, on the CPU
    and in one process; its loader's workers may be others.
    """
    reads = Reads(Path(str(main.__file__)).parent)
    with ExitStack() as stack:
        # Run reads the loss now and then by the clock
        stack.enter_context(patch.object(loop, "SECONDS_BETWEEN_CHECKS", 1e9))
        for name in METHODS:
            method = getattr(Tensor, name)
            stack.enter_context(patch.object(Tensor, name, reads.noting(name, method)))
        hook = register_optimizer_step_post_hook(reads.count_step)
        stack.callback(hook.remove)
        stack.enter_context(reads)
        main.main(words)
    if reads.steps < FEWEST:
        raise ValueError(f"{reads.steps} optimizer steps: {FEWEST} are needed")
    for line, steps in reads.steps_of.items():
        if steps.issuperset(range(FIRST, reads.steps)):
            return (
                f"{line}\nreads a value off the device in each step: the device waits"
            )
    return ""


class Reads(TorchDispatchMode):
    """Notes the lines of the files in `root` that ask for values, and in which steps."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.steps = 0  # that the optimizer has taken
        self.steps_of: dict[str, set[int]] = defaultdict(set)

    def count_step(self, *_: object) -> None:
        self.steps += 1

    def note_line(self) -> None:
        """Note the innermost line in `root` as "main.py:7: text"."""
        for frame, number in traceback.walk_stack(inspect.currentframe()):
            path = Path(frame.f_code.co_filename)
            if path.parent == self.root:
                text = linecache.getline(str(path), number).strip()
                self.steps_of[f"{path.name}:{number}: {text}"].add(self.steps)
                return

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        reads = not READ.isdisjoint(func.tags)
        if func.overloadpacket is torch.ops.aten.index:
            # a mask has to be counted, numbers do not
            reads = any(
                each is not None and each.dtype == torch.bool for each in args[1]
            )
        if reads:
            self.note_line()
        return func(*args, **(kwargs or {}))

    def noting(self, name: str, method: Callable) -> Callable:
        """Return a method of tensors that notes who calls it."""

        @functools.wraps(method)
        def noted(tensor: Tensor, *args: object, **options: object) -> object:
            is_read = name != "to" or args[:1] == ("cpu",)
            if is_read and not options.get("non_blocking"):
                self.note_line()
            return method(tensor, *args, **options)

        return noted
