"""What a training script keeps in its variables: no checkpoint has it.

A run notes checksums of them as an epoch begins, and in each checkpoint. By these a run that
resumes knows which of its variables have other values than those of the run that was stopped.
"""

import argparse
import collections
import contextlib
import inspect
import pickle
import queue
import re
import sys
import time
import types
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ddpkit.data.other_loaders import generators_in, samplers_of, seeded_anew
from ddpkit.ranks import distributed, module_state, replicas
from ddpkit.ranks.module_state import AnyGenerator
from ddpkit.run import agreement, states

FEW = 100  # items of a list, at each end, and of a dict, that are looked at
MOST_NUMBERS = 4096  # of a tensor that are
DEPTH = 5  # of lists in lists, and of objects in objects
A_DAY = 86400  # seconds
PLAIN = tuple(module_state.PLAIN)
COLLECTIONS = Mapping | set | frozenset | list | tuple | collections.deque
# What torch has in each optimizer; what else one has, its state_dict may lack
OF_OPTIMIZERS = "defaults", "param_groups", "state"
OF_PARTS = "part: "  # as names of these begin
# As names end of which an epoch's start may have any value: metrics, with what the epoch before
# has left in them, and floats, such as times.
AT_START = "?"
Checksums = dict[str, int]  # by the name of a variable


class LoopVariables:
    """Says which variables of a training loop a resume does not bring back.

    name: by which scripts call what has `numbers`. sees_end: whether an epoch is saved after all
        that the script does in it.
    """

    def __init__(self, name: str, sees_end: bool) -> None:
        self.name = name
        self.sees_end = sees_end
        self.first: Checksums = {}  # when the run began its first epoch
        self.at_start: Checksums = {}  # when this epoch's steps began, or go on
        self.at_end: Checksums = {}  # when the epoch before was saved
        self.set_anew: set[str] = set()  # between the two
        # of a checkpoint, by name: the first, at the start of its epoch, when it was saved
        self.saved: dict[str, tuple[int, int, int]] = {}
        self.said: set[str] = set()

    def begin_epoch(
        self, run: object, epoch: int, parts: states.Parts, is_within: bool
    ) -> None:
        """Note the variables; report which begin anew, or have changed from epoch to epoch.

        To call as its loop over steps begins. run: which one of the variables is. parts: what is
        in checkpoints. is_within: the epoch goes on where it was stopped.
        """
        if not distributed.is_rank_zero():
            return
        self.at_start = checksums(run, parts)
        if self.first:
            self._say_changed(epoch)
            return
        self.first = dict(self.at_start)
        self._say_anew(is_within)

    def _say_anew(self, is_within: bool) -> None:
        anew = []
        for name, (first, start, saved) in self.saved.items():
            now = self.at_start.get(name)
            if now is None:  # what is not there yet is set anew
                continue
            self.first[name] = first
            # What follows the epoch has another value than in the first. Within an epoch what its
            # start has worked out, as of the weights, is another one now.
            is_other = is_within and (start != saved or not name.endswith(AT_START))
            if now != saved and (is_other or now == first != start):
                anew.append(name)
        self.saved = {}
        self._say(
            anew,
            "not restored: results differ from an uninterrupted run's, unless each epoch sets them "
            "before it reads them",
        )

    def _say_changed(self, epoch: int) -> None:
        # What counts the epochs is known, before its next value or after.
        counts = short_hash(epoch), short_hash(epoch - 1)
        changed = []
        for name, first in self.first.items():
            now = self.at_start.get(name, first)
            may_be_saved = name.startswith(OF_PARTS)  # a resume tells
            if now in (first, *counts) or may_be_saved or name not in self.at_end:
                continue
            if self.sees_end and self.at_end[name] != now:
                self.set_anew.add(name)
            if name not in self.set_anew:
                changed.append(name)
        self._say(
            changed, "changed with the epoch: lost on resume unless each epoch sets it"
        )

    def _say(self, names: list[str], what: str) -> None:
        new = [name for name in names if name not in self.said]
        if not new:
            return
        self.said.update(new)
        plain = [name.rpartition(": ")[2].strip(AT_START) for name in new]
        distributed.print0(
            f"warning: {', '.join(plain)} {what}; variables are not saved: {self.name}.numbers"
            "(NAME=...) keeps numbers, lists and tensors, .epochs(N), .forever(loader) next(it), "
            f".common random numbers, {self.name.capitalize()}(NAME=...) what has a state_dict"
        )

    def changes(
        self, run: object, parts: states.Parts, is_between: bool
    ) -> dict[str, tuple[int, int, int]]:
        """Return, for a checkpoint, those that have changed, on rank 0.

        is_between: it is that of the end of an epoch.
        """
        if not self.at_start:  # as on all ranks but the first
            return self.saved
        now = checksums(run, parts, not is_between)
        if is_between:
            self.at_end = now
        changed = {}
        for name, saved in now.items():
            start = self.at_start.get(name, saved)
            found = self.first.get(name, start), start, saved
            if len(set(found)) > 1:
                changed[name] = found
        return changed


def checksums(run: object, parts: states.Parts, is_within: bool = True) -> Checksums:
    """Return those of the variables of the script's functions, from the outermost that has `run`.

    Also of the project's modules, and of the attributes of its own objects and of networks, but for
    what is in `parts`. Names begin with the inner function's, or the module's. is_within: also
    metrics, which each epoch begins anew, and the weights of what is no part.
    """
    known = {id(each) for each in (run, *seeded_anew())}
    saved = states.names_of(parts)
    for part in parts.values():
        # of networks, besides metrics, a checkpoint has no attributes
        if not isinstance(part, nn.Module) or states.is_metric(part):
            known.add(id(part))
        if isinstance(part, types.SimpleNamespace):  # numbers
            known.update(id(each) for each in vars(part).values() if is_mutable(each))
    found = {}
    hooks: list = []
    for function, variables in scopes(run):
        for name, value in variables.items():
            with contextlib.suppress(Exception):  # of objects of libraries
                value = replicas.bare(value)
                if name == "_" or name[:2] == "__" or id(value) in known:
                    continue
                if is_mutable(value):  # an inner function may be given it, too
                    known.add(id(value))
                if isinstance(value, nn.Module) and is_within:
                    # as of a copy that each epoch makes
                    found[f"{function}{name}.weights"] = short_hash(
                        [w.detach() for w in value.parameters() if w not in saved]
                    )
                for attribute, each in parts_of(value, is_within):
                    if attribute and is_mutable(each) and id(each) in known:
                        continue
                    # of a function here, a variable of this one, which is looked at itself
                    is_function = isinstance(value, types.FunctionType)
                    if is_function and variables.get(attribute[1:]) is each:
                        continue
                    full = function + name + attribute
                    full += AT_START * isinstance(each, float)
                    found[full] = short_hash(each)
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            trained = sum(weight.requires_grad for weight in part.parameters())
            found[f"{OF_PARTS}{name}.requires_grad"] = short_hash(trained)
            hooks += replicas.hooks_of(part)
        if isinstance(part, Optimizer):
            for kind in "pre", "post":  # which one made by hand may lack
                own = getattr(part, f"_optimizer_step_{kind}_hooks", {})
                hooks += own.values()
            for key, each in vars(part).items():
                if key not in OF_OPTIMIZERS and key[0] != "_":
                    found[f"{OF_PARTS}{name}.{key}"] = short_hash(each)
    found[f"{OF_PARTS}hooks of gradients and optimizers"] = short_hash(hooks)
    return found


def scopes(run: object) -> Iterator[tuple[str, dict]]:
    """Yield the variables of functions, and of modules, with what their names begin with."""
    others = {id(vars(module)): module for module in agreement.modules().values()}
    for function, frame in functions(run):
        variables = variables_of(frame)
        if not function:  # and those that it may declare global
            variables = {**frame.f_globals, **variables}
            others.pop(id(frame.f_globals), None)
        yield function, variables
    for module in others.values():
        yield f"{module.__name__}.", dict(vars(module))


def functions(run: object) -> Iterator[tuple[str, types.FrameType]]:
    """Yield the script's functions that are being called, the outermost first.

    That is the outermost of the project's, or that has `run`, which may be in an object or a dict.
    With what the names of their variables begin with, nothing for that one.
    """
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    of_script = 0
    while frame:
        frames.append(frame)
        path = agreement.own_path(frame.f_code.co_filename)
        if path or any(value is run for value in variables_of(frame).values()):
            of_script = len(frames)
        frame = frame.f_back
    prefix = ""
    for each in reversed(frames[:of_script]):
        if each.f_globals.get("__name__", "").partition(".")[0] != "ddpkit":
            yield prefix, each
            prefix = f"{each.f_code.co_name}: "


def variables_of(frame: types.FrameType) -> dict[str, object]:
    variables = dict(frame.f_locals)
    # Up to Python 3.12 a function's frame would keep this copy, and networks by it.
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals.clear()
    return variables


def parts_of(value: object, has_metrics: bool) -> Iterator[tuple[str, object]]:
    """Yield what is looked at by itself: attributes of networks, and of the script's objects."""
    if isinstance(value, nn.Module):
        for path, module in value.named_modules():
            inner = f".{path}" * bool(path)
            if states.is_metric(module):
                if has_metrics:
                    yield inner + AT_START, module.metric_state
                continue
            own = module_state.attributes(vars(module))
            for name in module._non_persistent_buffers_set:
                own[name] = module._buffers[name]
            hooks = module._forward_pre_hooks | module._forward_hooks
            own["hooks"] = [each for each in hooks.values() if is_own(kind_of(each))]
            for name, each in own.items():
                yield f"{inner}.{name}", each
        return
    if isinstance(value, DataLoader):
        for each in (*samplers_of(value), value.dataset):
            if is_own(kind_of(each)):
                yield f".{type(each).__name__}", each
    has_attributes = is_own(kind_of(value))
    if has_attributes:
        for name, held in attributes(value).items():
            each = replicas.bare(held)
            yield f".{name}", each
            if isinstance(each, nn.Module):
                for inner, part in parts_of(each, has_metrics):
                    yield f".{name}{inner}", part
    if not has_attributes or isinstance(value, COLLECTIONS):
        yield "", value


def is_mutable(value: object) -> bool:
    return not isinstance(value, PLAIN)


def kind_of(value: object) -> type | types.FunctionType:
    """Return the class of an object; a class or a function, which may have attributes, itself."""
    return value if isinstance(value, type | types.FunctionType) else type(value)


def is_own(kind: type | types.FunctionType) -> bool:
    """Return whether it is a class or function of the project, or the class of the flags."""
    if kind.__module__ in ("argparse", "builtins"):  # for which none has to look
        return kind is argparse.Namespace
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return bool(agreement.own_path(file))


def attributes(value: object) -> dict[str, object]:
    """Return those of an object or a class, without a call of what only looks like one.

    Of a function its defaults, and what it has from the function that has made it.
    """
    if isinstance(value, types.FunctionType):
        held = inspect.getclosurevars(value).nonlocals
        return {**held, "defaults": value.__defaults__}
    found = dict(getattr(value, "__dict__", {}))
    for name in getattr(value, "__slots__", ()):
        found[name] = getattr(value, name, None)
    again = seeded_anew()
    if hasattr(value, "set_epoch"):  # of a loader, which seeds its generators itself
        found.pop("epoch", None)
        again += generators_in(value)
    return {k: v for k, v in found.items() if not any(v is each for each in again)}


def short_hash(value: object) -> int:
    with contextlib.suppress(Exception):  # of what a library has
        return zlib.crc32(repr(content(value, DEPTH)).encode())
    return 0


def content(value: object, depth: int) -> object:
    """Return what changes if a value does, and is short; of other kinds of objects their class."""
    kind = kind_of(value)
    name = kind.__qualname__
    if isinstance(value, types.MethodType):
        return content(value.__self__, depth)
    if isinstance(value, queue.Queue):
        value = value.queue
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, AnyGenerator):
        return pickle.dumps(value)
    if isinstance(value, nn.Parameter | Optimizer):  # as in lists
        return name
    if isinstance(value, Tensor | np.ndarray):
        return name, value.shape, sample(torch.as_tensor(value).detach())
    if isinstance(value, float) and abs(value - time.time()) < A_DAY:
        return "a time"
    if isinstance(value, PLAIN):
        return value
    if not depth:
        return name
    if isinstance(value, types.GeneratorType) and not value.gi_yieldfrom:
        value = value.gi_frame and value.gi_frame.f_locals
    elif isinstance(value, Iterator) and not hasattr(value, "read"):
        # no file; of most nobody sees the place: always another one
        return getattr(value, "_num_yielded", time.monotonic_ns())
    # of a network its layers, not its weights
    elif is_own(kind) and not isinstance(value, COLLECTIONS | nn.Module):
        value = attributes(value)
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple | collections.deque):
        items = list(value)
        if len(items) > 2 * FEW:
            items = items[:FEW] + items[-FEW:]
        return name, len(value), [content(each, depth - 1) for each in items]
    # without its address
    return re.sub("0x[0-9a-fA-F]+", "", repr(value)[:MOST_NUMBERS])


def sample(tensor: Tensor) -> bytes:
    """Return the bytes of some of its numbers."""
    stride = max(tensor.numel() // MOST_NUMBERS, 1)
    some = tensor.reshape(-1)[::stride].cpu().contiguous()
    return some.view(torch.uint8).numpy().tobytes()
