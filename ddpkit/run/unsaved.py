"""What a training script changes and no checkpoint has: parts that were forgotten, variables."""

import argparse
import copy
import gc
import sys
import types
from collections.abc import Iterable
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


class Unsaved:
    """Says what trains and is in no checkpoint, each once.

    door: the class that is given the parts. parts: by name; others may come. stepped: the
        optimizers that have taken a step; others may come.
    """

    def __init__(
        self, door: str, parts: states.Parts, stepped: Iterable[Optimizer]
    ) -> None:
        self.door = door
        self.parts = parts
        self.stepped = stepped
        self.said: set[str] = set()
        # Of networks that are no parts, before the first step of this process.
        self.at_start: dict[nn.Module, int] = {}

    def begin(self) -> None:
        """Note, before the first step, what networks hold that are not among the parts."""
        self.at_start = states.checksums(other_networks(self.parts))

    def say_networks(self) -> None:
        """Say which of them have changed, as the teacher of a mean teacher, after a few steps."""
        then = self.at_start
        self.at_start = {}
        now = states.checksums(other_networks(self.parts))
        for network, checksum in now.items():
            if then.get(network, checksum) != checksum:
                kind = type(network).__name__
                self._say(kind, f"another {kind} whose weights change")

    def say(self) -> None:
        """Say which optimizers, schedulers and averages of the parts are not among them."""
        strays: set[Tensor] = set()
        for part in self.parts.values():
            if isinstance(part, Optimizer):
                strays.update(replicas.weights_of(part))
        strays -= states.names_of(self.parts).keys()
        if strays and "weights" not in self.said:
            self.said.add("weights")
            distributed.print0(
                f"warning: {len(strays)} of the optimizer's weights are in no network that "
                f"{self.door}(...) was given by name, such as a loss: they are in no checkpoint, "
                "and differ by rank"
            )
        for kind in unsaved(self.parts, self.stepped):
            self._say(kind, kind)

    def _say(self, kind: str, what: str) -> None:
        if kind in self.said:
            return
        self.said.add(kind)
        distributed.print0(
            f"warning: {what} is not given to {self.door}(...) by name: its state is in no "
            "checkpoint, and a resumed run goes on without it"
        )


def unsaved(parts: states.Parts, stepped: Iterable[Optimizer]) -> list[str]:
    """Return the classes of what trains the parts and is not among them, so that it is not saved.

    Optimizers that have stepped, or whose scheduler is a part; schedulers of any of these
    optimizers; averages of networks that are parts.
    """
    saved: list[object] = []
    for part in parts.values():
        saved += with_inner(part)
    schedulers = [each for each in saved if isinstance(each, LRScheduler)]
    optimizers = [each for each in saved if isinstance(each, Optimizer)]
    optimizers += map(replicas.bare, stepped)
    optimizers += [scheduler.optimizer for scheduler in schedulers]
    wanted: list[object] = [*optimizers]
    for scheduler in alive(LRScheduler):
        # one that could not be made has none
        if getattr(scheduler, "optimizer", None) in optimizers:
            wanted.append(replicas.bare(scheduler))
    networks = [each for each in saved if isinstance(each, nn.Module)]
    names = [network.state_dict().keys() for network in networks]
    for average in alive(AveragedModel):
        if average.module.state_dict().keys() in names:
            wanted.append(average)
    known = set(map(id, saved))
    return sorted({type(each).__name__ for each in wanted if id(each) not in known})


def with_inner(part: object) -> list[object]:
    """Return a part and what it holds and saves of its kind, as SequentialLR has schedulers."""
    kind = LRScheduler if isinstance(part, LRScheduler) else Optimizer | nn.Module
    found = [part]
    if isinstance(part, nn.Module):
        return found
    for each in tree_leaves(list(getattr(part, "__dict__", {}).values())):
        if isinstance(each, kind):
            found += with_inner(each)
    return found


def other_networks(parts: states.Parts) -> dict[nn.Module, states.State]:
    """Return the networks that are in no part, each with what is its own of its state."""
    known: set[int] = set()
    for part in parts.values():
        for each in with_inner(part):
            if isinstance(each, nn.Module):
                known.update(map(id, each.state_dict(keep_vars=True).values()))
    networks = [each for each in alive(nn.Module) if "_modules" in vars(each)]
    layers = {id(layer) for network in networks for layer in network.children()}
    found = {}
    for network in networks:
        if id(network) in layers:
            continue
        own = {}
        for name, each in network.state_dict(keep_vars=True).items():
            if isinstance(each, Tensor) and id(each) not in known:
                own[name] = each
        if own:
            found[network] = replicas.plain(own.items())
    return found


def alive(kind: type) -> list:
    """Return all objects of a class that this process has."""
    # By type: __class__ of a stand-in may be anything.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


class Changes:
    """Whether parts have changed since they were saved, or resumed, outside of the steps."""

    def __init__(self, parts: states.Parts) -> None:
        self.parts = parts
        self.then: dict[str, int] | None = None  # checksums

    def trainable(self) -> int:
        """Return how many weights of the networks are trained, and not frozen."""
        networks = [part for part in self.parts.values() if isinstance(part, nn.Module)]
        return sum(
            weight.requires_grad
            for network in networks
            for weight in network.parameters()
        )

    def note_saved(self, *kinds: type) -> None:
        """Note the parts as they are saved; of these `kinds`, if any are given."""
        names = [
            name
            for name, part in self.parts.items()
            if isinstance(part, kinds or object)
        ]
        self.then = self._summary(names)

    def since_saved(self) -> bool:
        """Return whether one has changed since `note_saved`, once; to call on all ranks."""
        then = self.then
        self.then = None
        if then is None:
            return False
        return distributed.from_rank_zero(lambda: self._summary(then) != then)

    def _summary(self, names: Iterable[str]) -> dict[str, int]:
        """Return on rank 0 what tells whether a part has changed."""
        if not distributed.is_rank_zero():
            return {}
        return states.checksums({name: self.parts[name].state_dict() for name in names})
