"""What a training script changes and no checkpoint has: parts that were forgotten, variables."""

import argparse
import copy
import gc
import sys
import types
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from ddpkit.ranks import distributed, process, replicas
from ddpkit.run import states


class LoopVariables:
    """Watches the numbers that the function with the training loop keeps in its variables.

    They are in no checkpoint: early stopping by a counter would not survive a resume.

    name: by which the function calls what has `numbers`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Of the first epoch of this process.
        self.at_start: dict[str, object] | None = None
        self.is_epoch: set[str] = set()  # names of what has always been the epoch
        self.is_said = False

    def begin_epoch(self, run: object, epoch: int, parts: states.Parts) -> None:
        """Say a line if other numbers than the epoch have changed in the epoch before.

        run: which one of the function's variables is. parts: what is in checkpoints.
        """
        if self.is_said:
            return
        numbers = numbers_around(run, list(parts.values()))
        equal = {name for name, value in numbers.items() if value == epoch}
        if self.at_start is None:
            self.at_start = numbers
            self.is_epoch = equal
            return
        self.is_epoch &= equal
        changed = []
        for name, value in self.at_start.items():
            if name not in self.is_epoch and numbers.get(name, value) != value:
                changed.append(name)
        if changed:
            self.is_said = True
            distributed.print0(
                f"warning: {', '.join(changed)} changed with the epoch: in no checkpoint, so that "
                "a resumed run starts with the first value; keep it as an attribute of "
                f"{self.name}.numbers({changed[0].rpartition('.')[2]}=...)"
            )


def numbers_around(run: object, saved: list[object]) -> dict[str, object]:
    """Return the numbers among the variables of the outermost function that has `run` as one.

    Also those of objects of classes that the project has defined, but for what is `saved`.
    """
    found: dict[str, object] = {}
    frame: types.FrameType | None = sys._getframe(1)
    while frame:
        if any(value is run for value in frame.f_locals.values()):
            # and those that it may declare global
            found = {**frame.f_globals, **frame.f_locals}
        frame = frame.f_back
    numbers = {
        name: value
        for name, value in found.items()
        if is_number(value) and name[:2] != "__"  # as __warningregistry__
    }
    for name, value in found.items():
        if is_own(value) and all(value is not part for part in saved):
            for key, each in vars(value).items():
                if is_number(each):
                    numbers[f"{name}.{key}"] = each
    return copy.deepcopy(numbers)


def is_own(value: object) -> bool:
    """Return whether it is an object of a class of the project, or the flags."""
    kind = type(value)
    if kind is argparse.Namespace:
        return True
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    in_project = file and Path(file).resolve().parent == process.project()
    return bool(in_project) and hasattr(value, "__dict__")


def is_number(value: object) -> bool:
    """Return whether it is a number, or a list or dict of them."""
    return all(isinstance(leaf, int | float) for leaf in tree_leaves(value))


def unsaved(parts: states.Parts) -> list[str]:
    """Return the kinds of optimizers of these networks, of their schedulers and averages that are
    not among the parts, and so are not saved.
    """
    kinds = (Optimizer, LRScheduler, AveragedModel)
    known = list(parts.values())
    for (
        part
    ) in known:  # and those within, as of a SequentialLR or a Lookahead; it grows
        if isinstance(part, Optimizer | LRScheduler):
            inner = tree_leaves(list(vars(part).values()))
            known += [each for each in inner if isinstance(each, kinds)]
    saved = {id(part) for part in known}
    weights = states.names_of(parts)
    networks = [part for part in known if isinstance(part, nn.Module)]
    averaged = [network.state_dict().keys() for network in networks]
    found = []
    for each in gc.get_objects():
        # By type: __class__ of a stand-in may be anything.
        if not issubclass(type(each), kinds) or id(replicas.bare(each)) in saved:
            continue
        if isinstance(each, AveragedModel):
            is_of_these = each.module.state_dict().keys() in averaged
        else:
            optimizer = getattr(each, "optimizer", each)  # of a scheduler
            # one that could not be made has none
            is_of_these = hasattr(optimizer, "param_groups") and any(
                weight in weights for weight in replicas.weights_of(optimizer)
            )
        if is_of_these:
            found.append(type(each).__name__)
    return sorted(found)


def say_unsaved(door: str, parts: states.Parts) -> None:
    """Say what is trained and is in no checkpoint; `door`: the class that was given the parts."""
    strays: set[Tensor] = set()
    for part in parts.values():
        if isinstance(part, Optimizer):
            strays.update(replicas.weights_of(part))
    strays -= states.names_of(parts).keys()
    if strays:
        distributed.print0(
            f"warning: {len(strays)} of the optimizer's weights are in no network that {door}(...) "
            "was given by name, such as a loss: they are in no checkpoint, and differ by rank"
        )
    for kind in unsaved(parts):
        distributed.print0(
            f"warning: {kind} is not given to {door}(...) by name: its state is in no checkpoint, "
            "and a resumed run goes on without it"
        )
