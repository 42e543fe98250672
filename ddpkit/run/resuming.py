"""For a training script of any shape: its state is saved, and resumed to the step."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddpkit.data import loading, samples
from ddpkit.data.other_loaders import Reading
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed, replicas
from ddpkit.ranks.stopping import (
    Stopped,
    agree,
    end_step,
    exit_stopped,
    on_signals,
)
from ddpkit.run import checkpoint, states
from ddpkit.run.checkpoint import Foreign
from ddpkit.run.folder import RunFolder
from ddpkit.run.progress import progress_line
from ddpkit.run.states import State

T = TypeVar("T")
END = object()  # of an iterator
KINDS = {"parts": dict, "kinds": dict, "resumed_from": str, "ranks": int, "seed": int}
COUNTS = ("epoch", "done", "step", "global_batch")
TO_UNDO = "undo that to resume, or use another folder, or resume='never'"
# Turns over which gradients are added up for a step; after more nobody waits for one.
MOST_ADDED_UP = 1000


class Turns:
    """How many there were since an optimizer took a step: any, it need not be a part.

    torch keeps the hook for ever: it holds this number alone, no network.
    """

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._begin_anew)

    def _begin_anew(self, *_: object) -> None:
        self.count = 0


class Checkpoints:
    """Saves all parts of a training script, and resumes them: within an epoch, to the same bits.

    Make it on all ranks once the parts are there; it resumes them. Its loops make all ranks leave
    after the same step when a signal comes, save, and exit with status 75; then start the script
    again.

    folder: gets last.pt, last-1.pt and best.pt, which torch.load(path, weights_only=True) reads,
        and is locked.
    parts: by name, whatever has state_dict and load_state_dict: networks, optimizers, schedulers,
        a GradScaler. Of a network in DistributedDataParallel, the network.
    resume: "auto" from last.pt, if it is there; "never"; or the path of a checkpoint.
    save_every: steps between saves; 0: after each epoch, and at a signal. seed: of the random
        numbers, of Python, NumPy and torch, in each step.

    epoch, step: those that are done. done: the steps of the epoch that are.

    Raises a UserError if the folder cannot be written, or if its checkpoint does not fit.

        checkpoints = ddpkit.Checkpoints("runs/a", model=model, optimizer=optimizer)
        for epoch in checkpoints.epochs(90):
            for images, targets in checkpoints.steps(train_loader):
                ...
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        resume: str = "auto",
        save_every: int = 0,
        seed: int = 0,
        **parts: Any,
    ) -> None:
        distributed.adopt_group()
        self.parts = {name: unwrapped(part) for name, part in parts.items()}
        check_parts(self.parts)
        self.folder = RunFolder(folder, resume, read_own)
        self.save_every = save_every
        self.seed = seed
        self.epoch = 0
        self.done = 0
        self.step = 0
        self.global_batch = 0  # of a train_loader, to know whether it is the same
        self.best: float | None = None
        self.ranks_then = distributed.world_size()
        self.is_in_epochs = False
        self.reading = Reading(seed)
        self.is_begun = False  # a loop over steps, of which an epoch has one
        self.is_in_step = False
        self.is_due = False  # a save, at the end of the step or epoch
        self.turns = Turns()
        self.folder.find_checkpoint()
        state = self.folder.take_state(["parts"])
        self.folder.open_for_training(is_new=not state)
        if state:
            self._load(state)
        states.fill_momenta(self.parts)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs, from 0, that are left of `count`; saves at the end of each."""
        with on_signals(self._position), self._in_epochs():
            while self.epoch < count:
                # for what is drawn before its steps, such as by zip(loader, other)
                share = distributed.rank() if self.reading.is_seeded_by_rank else 0
                samples.seed(self.seed, self.epoch, share, 0, 0)
                self.is_begun = False
                yield self.epoch
                self.epoch += 1
                self.done = 0
                if self._is_between() and self.epoch < count:
                    self.is_due = True
                    continue
                self._write()
                try:
                    agree()
                except Stopped:
                    self._leave()

    @contextlib.contextmanager
    def _in_epochs(self) -> Iterator[None]:
        self.is_in_epochs = True
        try:
            yield
        finally:
            self.is_in_epochs = False

    def steps(self, batches: Iterable[T], *networks: nn.Module) -> Iterator[T]:
        """Yield the batches that are left of this epoch; the time in between is a step.

        batches: those of `train_loader` go on at once. Of another loader those before are read
            again, and left out; a range, or a list, is cut. All ranks have to take the same number.
        networks: in DistributedDataParallel, for the same bits on more than two ranks.

        There is one loop in an epoch. Each step begins with random numbers of its own. Saves if
        that is due, and, without `epochs`, at the end; after a signal all ranks leave after the
        same step. Both wait for a turn in which an optimizer takes a step, if gradients are added
        up over several.
        """
        for network in networks:
            replicas.prepare_network(network)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._in_loop())
            if not self.is_in_epochs:
                stack.enter_context(on_signals(self._position))
            found = self._rest(batches)
            batch: Any = next(found, END)
            while batch is not END:
                samples.seed(self.seed, self.epoch, self.done, distributed.rank())
                self.turns.count += 1
                self.is_in_step = True
                yield batch
                self.is_in_step = False
                self.done += 1
                self.step += 1
                if self.save_every and self.step % self.save_every == 0:
                    self.is_due = True
                if self.is_due and not self._is_between():
                    self._write()
                batch = next(found, END)
                self._end_step(is_last=batch is END)
            if not self.is_in_epochs:
                self._end_loop()

    @contextlib.contextmanager
    def _in_loop(self) -> Iterator[None]:
        if self.is_begun:
            raise UserError(
                "a second loop over checkpoints.steps: there is one in each turn of the loop over "
                "checkpoints.epochs, or one in all; give it all batches, such as "
                "itertools.chain(loader, other)"
            )
        self.is_begun = True
        try:
            yield
        except BaseException:  # also if it is left: in a notebook it may go on
            self.is_begun = self.is_in_epochs
            raise
        finally:
            self.is_in_step = False

    def _end_loop(self) -> None:
        if self.folder.saved_step != self.step:
            self._write()
        go_on()

    def save(self) -> None:
        """Write last.pt: within a step, or an epoch, at its end; to call on all ranks."""
        self.is_due = True
        if not self._is_inside():
            self._write()

    def _is_inside(self) -> bool:
        """Return whether the parts may have changed since the step, or epoch, that is counted."""
        return self.is_in_step or self.is_in_epochs

    def save_best(self, score: float, is_higher: bool = True) -> bool:
        """Write best.pt now if rank 0's `score` is the best so far; return whether it is.

        is_higher: whether a higher score is better. All ranks have to call it.
        """
        score = distributed.from_rank_zero(lambda: float(score))
        is_better = self.best is None or (
            score > self.best if is_higher else score < self.best
        )
        if not is_better or math.isnan(score):
            return False
        self.best = score
        self.folder.add_best(self._state(self._is_inside()))
        self.save()
        return True

    def _is_between(self) -> bool:
        """Return whether gradients have been added up that no optimizer step has used yet."""
        if not 0 < self.turns.count <= MOST_ADDED_UP:
            return False
        for part in self.parts.values():
            if isinstance(part, Optimizer):
                weights = replicas.weights_of(part)
                if any(weight.grad is not None for weight in weights):
                    return True
        return False

    def _write(self) -> None:
        self.is_due = False
        self.folder.add(self._state(is_inside=False), is_best=False)

    def _state(self, is_inside: bool) -> State:
        return {
            "parts": states.take_states(self.parts),
            "kinds": states.kinds(self.parts),
            "resumed_from": self.folder.resume,
            "ranks": distributed.world_size(),
            "seed": self.seed,
            "epoch": self.epoch,
            "done": self.done,
            "step": self.step,
            "is_inside": is_inside,
            "global_batch": self.global_batch,
            "best": self.best,
        }

    def _load(self, state: State) -> None:
        path = state["path"]
        plural = "s" * (state["epoch"] != 1)
        distributed.print0(progress_line(state, state["done"], f"epoch{plural}"))
        if state.get("is_inside"):
            distributed.print0(
                "it was saved within a step, or before the end of an epoch: what the script did "
                "there before is done once more"
            )
        names = states.names_of(self.parts)
        self._compare_names(path, state["parts"].keys())
        for name, part in self.parts.items():
            if states.is_missing(name, state["parts"], path):
                continue
            with states.fitting(path, name, TO_UNDO):
                kind = state["kinds"].get(name)
                states.load_part(name, part, state["parts"][name], kind, names)
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.done = state["done"]
        self.global_batch = state["global_batch"]
        self.best = state["best"]
        self.ranks_then = state["ranks"]
        if self.done and state["seed"] != self.seed:
            self._start_over(f"seed {state['seed']} then")

    def _compare_names(self, path: str, then: Iterable[str]) -> None:
        """Raise a UserError if a part may have been renamed; say which are no parts any more."""
        left = sorted(set(then) - self.parts.keys())
        new = sorted(self.parts.keys() - set(then))
        if left and new:
            raise UserError(
                f"{path} has {shorten(left)} and no {shorten(new)}: give the parts their former "
                "names, or use another folder, or resume='never'"
            )
        if left:
            distributed.print0(
                f"{path} has {shorten(left)}, for which Checkpoints is given no part: left out, "
                "and not in what is saved from here on"
            )

    def _start_over(self, reason: str) -> None:
        distributed.print0(f"{reason}: the epoch that was stopped starts over")
        self.done = 0

    def _rest(self, batches: Iterable[T]) -> Iterator[T]:
        """Return an iterator over what is left of the epoch's `batches`."""
        global_batch = getattr(getattr(batches, "sampler", None), "global_batch", 0)
        if global_batch:
            if self.done and global_batch != self.global_batch:
                self._start_over("another batch size, or other ranks, then")
            self.global_batch = global_batch
        elif self.done and not isinstance(batches, Sequence):
            ranks = self.ranks_then
            if ranks != distributed.world_size():
                self._start_over(f"{ranks} ranks then")
        return self.reading.rest(batches, self.epoch, self.done)

    def _end_step(self, is_last: bool) -> None:
        try:
            end_step()
        except Stopped:
            # It is raised again in each turn until the ranks leave.
            if self._is_between():
                return
            # Resumed after its last step a loop would have no turn, for which few scripts
            # are written: the ranks leave at the end of the epoch.
            if not is_last:
                self._leave()

    def _leave(self) -> NoReturn:
        if self.folder.saved_step != self.step:
            self._write()
        exit_stopped(f"and saved at {self._position()}; the same command goes on")

    def _position(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.done}"


def unwrapped(part: Any) -> Any:
    """Return the network in DistributedDataParallel; anything else as it is."""
    network = replicas.uncompiled(part)
    return network.module if isinstance(network, DistributedDataParallel) else part


def check_parts(parts: dict[str, object]) -> None:
    """Raise a UserError unless each part has what a checkpoint needs of it."""
    for name, part in parts.items():
        for method in "state_dict", "load_state_dict":
            if not callable(getattr(part, method, None)):
                raise UserError(
                    f"Checkpoints({name}=...): a {type(part).__name__} has no {method}: give parts "
                    "that have one; numbers and generators of random numbers need none, if they "
                    "follow from checkpoints.epoch and checkpoints.step"
                )


def read_own(path: Path | str) -> State:
    """Return the checkpoint at `path`, tensors on the CPU.

    Raises a UserError if it cannot be read, or is none of Checkpoints.
    """
    state = checkpoint.read_file(path)
    is_right = all(isinstance(state.get(name), kind) for name, kind in KINDS.items())
    for name in COUNTS:
        is_right = is_right and isinstance(state.get(name), int) and state[name] >= 0
    is_right = is_right and isinstance(state.get("best"), float | None)
    if not is_right:
        raise Foreign(
            f"{path}: not a checkpoint of ddpkit.Checkpoints: use another one"
        )
    return {**state, "path": str(path)}


def go_on() -> None:
    """After the last step all ranks go on, also if a signal has come to one of them."""
    try:
        agree()
    except Stopped:
        distributed.print0("all steps are done: the script goes on to its end")


@contextlib.contextmanager
def stopping(save: Callable[[], object] | None = None) -> Iterator[Callable[[], None]]:
    """Within the block a signal makes all ranks leave after the same step, with status 75.

    Yields a function to call on all ranks at the end of each step. save: is called then, on all
    ranks. A rank without progress for long is shown. `Checkpoints` does this itself.

        with ddpkit.stopping(save) as end_step:
            for images, targets in loader:
                ...
                end_step()
    """
    distributed.adopt_group()
    with on_signals(str):
        try:
            yield end_step
            go_on()
        except Stopped:
            if save:
                save()
            exit_stopped("and saved" if save else "")


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Within the block a rank that fails ends all, and one line or block says why, and where.

    A hang of the collectives prints where each rank is. Put it around all of a script's work.

        if __name__ == "__main__":
            with ddpkit.explaining():
                main()
    """
    from ddpkit.ranks import failures, process

    process.install_handlers()
    process.note_start()
    with failures.one_line_errors(loading.explain_loading):
        yield
