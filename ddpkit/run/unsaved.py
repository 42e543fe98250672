"""Networks, optimizers and schedulers that a training script changes and no checkpoint has."""

import contextlib
import gc
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from ddpkit.ranks import distributed, replicas
from ddpkit.run import states


class Unsaved:
    """Reports what training changes and is not among the parts, and so in no checkpoint; each once.

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
        self.at_start: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def note_networks(self) -> None:
        """Note, before the first step, what networks hold that are not among the parts."""
        self.at_start.update(states.checksums(other_networks(self.parts)))

    def say_networks(self) -> None:
        """Report after a few steps which of them have changed, as the one of a mean teacher."""
        gc.collect()  # those of an earlier run in this process
        for network, checksum in states.checksums(other_networks(self.parts)).items():
            # An average of the last epochs has not begun.
            is_waiting = isinstance(network, AveragedModel) and not network.n_averaged
            if is_waiting or self.at_start.get(network, checksum) != checksum:
                self._say(f"another model of class {type(network).__name__}")
        self.at_start.clear()
        for ddp_model in alive(DistributedDataParallel):
            for _, state in ddp_model._comm_hooks:  # as PowerSGD's
                is_own = not isinstance(state, ProcessGroup | None)
                if is_own and state not in self.parts.values():
                    self._say(type(state).__name__)
        strays: set[Tensor] = set()
        for part in self.parts.values():
            if isinstance(part, Optimizer):
                strays.update(replicas.weights_of(part))
        strays -= states.names_of(self.parts).keys()
        if strays:
            distributed.print0(
                f"warning: {len(strays)} of the optimizer's weights are in no module passed to "
                f"{self.door}(...) by name (a loss?): they are not saved, and differ between ranks"
            )

    def say_optimizers(self) -> None:
        """Report which have stepped, when there are new ones; their schedulers, and scalers."""
        if self.looked_at == len(self.stepped):
            return
        self.looked_at = len(self.stepped)
        saved: list[Any] = []
        for part in self.parts.values():
            saved += with_inner(part)
        training: list = [each for each in saved if isinstance(each, Optimizer)]
        training += map(replicas.bare, self.stepped)
        for scheduler in alive(LRScheduler):
            # one that could not be made has none
            if replicas.bare(getattr(scheduler, "optimizer", None)) in training:
                training.append(replicas.bare(scheduler))
        training += filter(GradScaler.is_enabled, alive(GradScaler))
        for each in training:
            if each not in saved:
                self._say(type(each).__name__)

    def _say(self, what: str) -> None:
        if what in self.said:
            return
        self.said.add(what)
        distributed.print0(
            f"warning: {what} is not passed to {self.door}(...) by name: its state is not saved, "
            "and a resumed run continues without it"
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
