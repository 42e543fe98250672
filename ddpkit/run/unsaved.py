"""What a training script changes and no checkpoint has: parts that were forgotten, variables."""

import argparse
import contextlib
import copy
import gc
import sys
import types
from collections.abc import Collection
from pathlib import Path
from typing import Any

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
        # of the first epoch of this process
        self.at_start: dict[str, object] | None = None
        self.is_said = False

    def begin_epoch(self, run: object, epoch: int, parts: states.Parts) -> None:
        """Say a line if other numbers than the epoch have changed in the epoch before.

        run: which one of the function's variables is. parts: what is in checkpoints.
        """
        if self.is_said:
            return
        numbers = numbers_around(run, list(parts.values()))
        if self.at_start is None:
            self.at_start = numbers
        changed = []
        for name, value in self.at_start.items():
            # what counts the epochs is known, before its next value or after
            if numbers.get(name, value) not in (value, epoch, epoch - 1):
                changed.append(name)
        if changed:
            self.is_said = True
            changed.sort(key=lambda name: "." in name)  # attributes come last
            distributed.print0(
                f"warning: {', '.join(changed)} changed with the epoch: in no checkpoint, so that "
                "a resumed run starts with the first value; keep it as an attribute of "
                f"{self.name}.numbers({changed[0].rpartition('.')[2]}=...)"
            )


def numbers_around(run: object, saved: list[object]) -> dict[str, object]:
    """Return the numbers among the variables of the outermost function that has `run` as one.

    Also those of objects of classes that the project has defined, but for what is `saved`.
    """
    variables: dict[str, object] = {}
    frame: types.FrameType | None = sys._getframe(1)
    while frame:
        if any(value is run for value in frame.f_locals.values()):
            # and those that it may declare global
            variables = {**frame.f_globals, **frame.f_locals}
        frame = frame.f_back
    numbers = {}
    for name, value in variables.items():
        if is_number(value) and name[:2] != "__":  # as __warningregistry__
            numbers[name] = value
        elif is_own(value) and all(value is not part for part in saved):
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


class Unsaved:
    """Says what training changes and is not among the parts, and so in no checkpoint; each once.

    door: the class that is given the parts. parts: by name; others may come. stepped: the
        optimizers that have taken a step; others may come.
    """

    def __init__(
        self, door: str, parts: states.Parts, stepped: Collection[Optimizer]
    ) -> None:
        self.door = door
        self.parts = parts
        self.stepped = stepped
        self.looked_at = 0  # optimizers
        self.said: set[str] = set()
        # of networks that are no parts, before the first step of this process
        self.at_start: dict[nn.Module, int] = {}

    def note_networks(self) -> None:
        """Note, before the first step, what networks hold that are not among the parts."""
        self.at_start = states.checksums(other_networks(self.parts))

    def say_networks(self) -> None:
        """Say after a few steps which of them have changed, as the one of a mean teacher."""
        then = self.at_start
        self.at_start = {}
        for network, checksum in states.checksums(other_networks(self.parts)).items():
            # An average of the last epochs has not begun.
            is_waiting = isinstance(network, AveragedModel) and not network.n_averaged
            if is_waiting or then.get(network, checksum) != checksum:
                self._say(f"another network of class {type(network).__name__}")
        strays: set[Tensor] = set()
        for part in self.parts.values():
            if isinstance(part, Optimizer):
                strays.update(replicas.weights_of(part))
        strays -= states.names_of(self.parts).keys()
        if strays:
            distributed.print0(
                f"warning: {len(strays)} of the optimizer's weights are in no network that "
                f"{self.door}(...) was given by name, such as a loss: they are in no checkpoint, "
                "and differ by rank"
            )

    def say_optimizers(self) -> None:
        """Say which have stepped, when there are new ones; and schedulers of all that train."""
        if self.looked_at == len(self.stepped):
            return
        self.looked_at = len(self.stepped)
        saved: list[Any] = []
        for part in self.parts.values():
            saved += with_inner(part)
        optimizers = [each for each in saved if isinstance(each, Optimizer)]
        optimizers += map(replicas.bare, self.stepped)
        training: list[Any] = [*optimizers]
        for scheduler in alive(LRScheduler):
            # one that could not be made has none
            if replicas.bare(getattr(scheduler, "optimizer", None)) in optimizers:
                training.append(replicas.bare(scheduler))
        for each in training:
            if each not in saved:
                self._say(type(each).__name__)

    def _say(self, what: str) -> None:
        if what in self.said:
            return
        self.said.add(what)
        distributed.print0(
            f"warning: {what} is not given to {self.door}(...) by name: its state is in no "
            "checkpoint, and a resumed run goes on without it"
        )


def with_inner(part: Any) -> list[Any]:
    """Return a part, and what it holds of which it saves the state, as SequentialLR does."""
    saved = [part]
    if isinstance(part, nn.Module):
        return saved
    kinds: tuple[type, ...] = (Optimizer, nn.Module)
    held = list(getattr(part, "__dict__", {}).values())
    if isinstance(part, LRScheduler):
        kinds = (LRScheduler,)  # in lists, too; not its optimizer
        held = tree_leaves(held)
    for each in held:
        if isinstance(each, kinds):
            saved += with_inner(each)
    return saved


def other_networks(parts: states.Parts) -> dict[nn.Module, states.State]:
    """Return the networks that are in no part, and of each the tensors that are in no part."""
    saved: set[int] = set()
    for part in parts.values():
        for each in with_inner(part):
            if isinstance(each, nn.Module):
                saved.update(map(id, [*each.parameters(), *each.buffers()]))
    # one that could not be made has no layers
    modules = [each for each in alive(nn.Module) if "_modules" in vars(each)]
    layers = {id(layer) for module in modules for layer in module.children()}
    others = {}
    for module in modules:
        if id(module) in layers:
            continue
        with contextlib.suppress(Exception):  # of what a library has as a network
            names = module.state_dict().keys()  # without caches
            own = []  # a wrapper of a part has none
            for name, each in (*module.named_parameters(), *module.named_buffers()):
                if name in names and id(each) not in saved:
                    own.append((name, each))
            if own:
                others[module] = replicas.plain(own)
    return others


def alive(kind: type) -> list:
    """Return all objects of a class that this process has."""
    # By type: __class__ of a stand-in may be anything.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
