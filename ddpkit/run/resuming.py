"""The engine of a training script: its state is saved, and resumed to the step.

Where a script is in its loops is one of the phases below, and decides what it may do next. A save
that is asked for within a step, or an epoch, waits for its end.

    with epochs:     OUTSIDE -> EPOCH -> STEPS -> LAST_STEP -> AFTER -> EPOCH ... -> OUTSIDE
    without epochs:  OUTSIDE -> ALONE -> DONE, or, if the loop is left, OUTSIDE again
"""

import contextlib
import copy
import enum
import functools
import itertools
import math
import random
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddpkit.data import loading, samples
from ddpkit.data.other_loaders import Reading, note_seeded
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed, replicas, stopping
from ddpkit.ranks.stopping import (
    Stopped,
    agree,
    end_step,
    exit_stopped,
    note_kept,
    on_signals,
)
from ddpkit.ranks.virtual import VirtualRanks
from ddpkit.ranks.virtual_steps import VirtualSteps, check_ended
from ddpkit.run import agreement, checkpoint, finite, states, unsaved
from ddpkit.run.folder import RunFolder
from ddpkit.run.progress import progress_line, say_batches
from ddpkit.run.states import State
from ddpkit.run.variables import LoopVariables

# What a checkpoint has to contain
NEEDED = "parts kinds resumed_from ranks seed epoch done step global_batch best"
# What decides which batches follow; of an older version some is not known.
UNKNOWN: State = {"global_batch": 0, "training_set": "", "ranks": 0, "length": 0}
TO_UNDO = "undo that to resume, or use another folder or resume='never'"
# Turns over which gradients are added up for a step; after more nobody waits for one.
MOST_ADDED_UP = 1000
NUMBERS = "numbers"  # the part that `numbers` makes
FOREVER = "forever"  # those of `forever`, with a number
# Classes of which no rank has the whole
SHARDED = {
    "DTensor",
    "DeepSpeedEngine",
    "FullyShardedDataParallel",
    "ZeroRedundancyOptimizer",
}


class Phase(enum.Enum):
    OUTSIDE = "of all loops"
    EPOCH = "an epoch has begun, its loop over steps has not"
    STEPS = "in that loop"
    LAST_STEP = "in that loop, and all before its last optimizer step is saved"
    AFTER = "after that loop, before the end of the epoch"
    ALONE = "in the loop over steps of a run without epochs"
    DONE = "after that loop, of which a run has one"


IN_LOOP = (Phase.STEPS, Phase.LAST_STEP, Phase.ALONE)


class Turns:
    """Those since an optimizer took a step: any, it need not be a part.

    torch keeps the hook for ever: it holds no network.
    """

    def __init__(self) -> None:
        self.count = 0
        self.period = 1  # turns that the last step of an optimizer took
        self.stepped: WeakSet[Optimizer] = WeakSet()  # the optimizers that have
        register_optimizer_step_post_hook(self._begin_anew)

    def _begin_anew(self, optimizer: Optimizer, *_: object) -> None:
        check_ended()
        self.stepped.add(optimizer)
        self.period = max(self.count, 1)
        self.count = 0


class Numbers(types.SimpleNamespace):
    """What a script counts or collects in its loop, by name: a part of its state."""

    def state_dict(self) -> State:
        return dict(vars(self))  # a save copies it

    def load_state_dict(self, saved: State) -> None:
        vars(self).update(copy.deepcopy(saved))


class Forever:
    """Endless batches for next(): epoch after epoch of a loader; its place is a part."""

    def __init__(self, loader: Iterable, read: Callable[..., Iterator]) -> None:
        self.loader = loader
        self.read = read  # (loader, epoch, batches that are left out) -> the others
        self.epoch = 0
        self.done = 0
        self.batches = self._batches()

    def _batches(self) -> Iterator:
        while True:
            for batch in self.read(self.loader, self.epoch, self.done):
                self.done += 1
                yield batch
            if not self.done:
                raise UserError("an endless loader returned no batches")
            self.epoch += 1
            self.done = 0

    def __iter__(self) -> "Forever":
        return self

    def __next__(self) -> Any:
        return next(self.batches)

    def state_dict(self) -> State:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, saved: State) -> None:
        self.epoch = saved["epoch"]
        self.done = saved["done"]
        self.batches = self._batches()


class Group:
    """The batches of a step, of all virtual ranks of this process; a loop begins each pass."""

    def __init__(self, batches: Iterable, take: Callable[..., Iterator]) -> None:
        self.batches = list(batches)
        self.take = take

    def __iter__(self) -> Iterator:
        return self.take(self.batches, len(self.batches))


class Steps:
    """A loop over steps, of which an epoch has one. Its length is that of a whole epoch."""

    def __init__(self, length: int, begin: Callable[[], Iterator]) -> None:
        self.length = length
        self.begin = begin

    def __len__(self) -> int:
        return self.length  # of a stream None, for which Python raises a TypeError

    def __iter__(self) -> Iterator:
        return self.begin()


class Checkpoints:
    """Saves all parts of a training script, and resumes them: within an epoch, to the same bits.

    Make it on all ranks once the parts are there; it resumes them. Its loops make all ranks leave
    after the same step when a signal comes, save, and exit with status 75; then start the script
    again.

    folder: gets last.pt, last-1.pt and best.pt, which torch.load(path, weights_only=True) reads,
        and is locked.
    parts: by name, whatever has state_dict and load_state_dict. Networks, optimizers, schedulers
        and a GradScaler have to be the same on all ranks, which each save checks. Of others, such
        as a reader with a place of its own, the states of all ranks are kept if they differ. Of a
        network in DistributedDataParallel, or in Fabric's wrapper, the network.
    resume: "auto" from last.pt, if it is there; "never"; or the path of a checkpoint.
    save_every: steps between saves; 0: after each epoch, and at a signal. seed: of the random
        numbers, of Python, NumPy and torch, in each step: those that ranks draw alike, if all ranks
        have seeded torch alike, else those of each rank.

    epoch, step: those that are done. done: the steps of the epoch that are. best: the best score.
    ranks: how many there are, virtual ones with VirtualRanks. rank: which one a pass is of.

    Raises a UserError if the folder cannot be written, or if its checkpoint does not fit.

        checkpoints = ddpkit.Checkpoints("runs/a", model=model, optimizer=optimizer)
        for epoch in checkpoints.epochs(90):
            for images, targets in checkpoints.steps(train_loader):
                ...
    """

    name = "checkpoints"  # as scripts call it, for messages
    goes_on_after_last = True  # step of an epoch, though a signal has come
    # phases in which the parts have changed in nothing but the steps, and epochs, that are counted
    settled = frozenset({Phase.OUTSIDE, Phase.DONE})
    place = UNKNOWN

    def __init__(
        self,
        folder: Path | str | RunFolder,
        *,
        resume: str = "auto",
        save_every: int = 0,
        seed: int = 0,
        **parts: Any,
    ) -> None:
        distributed.adopt_group()
        check_parts(type(self).__name__, parts)
        self.parts = {name: replicas.bare(part) for name, part in parts.items()}
        self.save_every = save_every
        self.seed = seed
        self.epoch = 0
        self.done = 0
        self.step = 0
        self.best_score: float | None = None
        self.ranks = distributed.world_size()
        self.rank = distributed.rank()
        self.reading = Reading(seed)
        # whether the ranks have seeded torch each with a number of its own
        self.draws_by_rank = self.reading.is_seeded_by_rank
        # of the key of the random numbers outside of steps
        self.share_outside = self.rank * self.draws_by_rank
        self.virtual: VirtualSteps | None = None  # of this loop
        self.streams: dict[int, random.Random] = {}
        self.first_step = 0  # of this process
        self.phase = Phase.OUTSIDE
        self.begun = 0  # the step of the epoch that began last, from 1
        self.is_due = False  # a save, at the end of the step or epoch
        self.turns = Turns()
        # those of a Run go on after `end_epoch`
        self.variables = LoopVariables(self.name, self.goes_on_after_last)
        self.unsaved = unsaved.Unsaved(
            type(self).__name__, self.parts, self.turns.stepped
        )
        self.later: dict[str, State] = {}  # saved states of parts that are made later
        # of networks, those of each rank: DistributedDataParallel gives all those of rank 0
        self.buffers: dict[str, list[State]] = {}
        if not isinstance(folder, RunFolder):
            folder = RunFolder(folder, resume, read_own)
            folder.find_checkpoint()
        self.folder = folder
        state = folder.state or {}
        if state:
            with states.fitting(state["path"], "this script", TO_UNDO):
                self._load(state)
        self.variables.saved = state.get("variables", {})
        folder.open_for_training([*self.parts, "parts"])
        states.fill_momenta(self.parts)
        self.first_epoch = self.epoch  # of this process
        # not of a loader, whose state may begin to read it
        kinds = (nn.Module, *states.ON_ALL)
        # of parts as they begin, or were saved at the end of an epoch: until the next steps
        self.saved_sums = self._checksums(
            name for name, part in self.parts.items() if isinstance(part, kinds)
        )

    @property
    def best(self) -> float | None:
        """The best score of `save_best` so far."""
        return self.best_score

    # What a script counts, and reads, beside its parts.

    def numbers(self, **first: object) -> Any:
        """Return an object with these attributes, which are saved and resumed: a part.

        For what a loop counts or collects: numbers, texts, tensors, lists and dicts of them.

            numbers = checkpoints.numbers(best=0.0, bad=0)
            numbers.bad += 1
        """
        return self._add(NUMBERS, Numbers(**first))

    def forever(self, loader: Iterable) -> Forever:
        """Return endless batches of `loader` for next(), whose place is saved and resumed.

        To call once for each loader, in the same order in each start.

            unlabelled = checkpoints.forever(unlabelled_loader)
            images = next(unlabelled)
        """
        number = 1 + sum(isinstance(part, Forever) for part in self.parts.values())
        note_seeded(loader, number)
        read = functools.partial(self.reading.rest, number=number)
        return self._add(f"{FOREVER}{number}", Forever(loader, read))

    def _add(self, name: str, part: Any) -> Any:
        if name in self.parts:
            raise UserError(
                f"{self.name}.{name} is called twice: pass everything in one call"
            )
        self.parts[name] = part
        if name in self.later:
            part.load_state_dict(self.later.pop(name))
        return part

    # The loops.

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs, from 0, that are left of `count`; saves at the end of each.

        It also saves before the last step of each: if what follows the steps does not end in time
        after a signal, that step is done once more, and nothing is lost.
        """
        with self._in_run(), self._in_epochs():
            if (
                self.epoch >= count
            ):  # the script goes on with what it has: say what it lost
                self.variables.begin_epoch(self, self.epoch, self.parts, True)
            while self.epoch < count:
                # for what is drawn before its steps, such as by zip(loader, other)
                samples.seed(self.seed, self.epoch, self.share_outside, 0, 0)
                self._begin_epoch()
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
    def _in_run(self) -> Iterator[None]:
        """Of it all. A script draws on after it as before, also if it was done by then."""
        with samples.keeping_random_state(), on_signals(self._here):
            yield

    @contextlib.contextmanager
    def _in_epochs(self) -> Iterator[None]:
        self._begin_epoch()
        try:
            yield
        finally:
            self.phase = Phase.OUTSIDE

    def _begin_epoch(self) -> None:
        self.phase = Phase.EPOCH
        self.begun = 0
        loading.TrainSampler.set_all(self.epoch)
        note_kept("")

    def steps(self, batches: Iterable, /, *networks: nn.Module) -> Steps:
        """Return a loop over the batches that are left of this epoch; each turn is a step.

        batches: those of `train_loader` go on at once. Of another loader those before are read
            again, and left out; a range, or a list, is cut. If ranks have unequal numbers, all take
            the least; of a stream without a length all have to take the same number.
        networks: in DistributedDataParallel, for the same bits on more than two ranks.

        There is one loop in an epoch. Each step begins with random numbers of its own. Saves if
        that is due, and, without `epochs`, at the end; after a signal all ranks leave after the
        same step. Both wait for a turn in which an optimizer takes a step, if gradients are added
        up over several. With `VirtualRanks`, and a train_loader of them, a turn has the batches of
        all virtual ranks of this process: for x, y in batches.
        """
        lengths = distributed.gather_objects(samples.size(batches))
        length: Any = None if None in lengths else min(lengths)
        virtual_ranks = 0
        if isinstance(batches, loading.Loader) and batches.is_train:
            virtual_ranks = batches.sampler.virtual_ranks
            if virtual_ranks:
                length = batches.sampler.steps
            if self.step == self.first_step:
                agreement.check_alike((), training=batches)
        else:
            note_seeded(batches)

        def begin() -> Iterator:
            rest = functools.partial(self._rest, batches, length)
            return self._turns(rest, networks, length, virtual_ranks)

        return Steps(length, begin)

    def _turns(
        self,
        begin: Callable[[], Iterator],
        networks: Sequence[nn.Module],
        length: int | None,
        virtual_ranks: int = 0,
    ) -> Iterator:
        """Yield what is left of the batches of an epoch, which has `length`, if that is known."""
        self._keep_changes()
        self.variables.begin_epoch(self, self.epoch, self.parts, self.done > 0)
        for network in networks:
            replicas.prepare_network(network)
        self._load_buffers()
        self._find_virtual(networks, virtual_ranks)
        if self.step == self.first_step:
            self.unsaved.note_networks()
            for ddp_model in unsaved.alive(DistributedDataParallel):
                if ddp_model.module in self.parts.values():
                    replicas.prepare_network(ddp_model)
        with self._in_loop():
            rest = begin()
            self._keep_before_last(length)
            for batch in rest:
                self._begin_rank(self.ranks if self.virtual else self.rank)
                self.turns.count += 1
                before = self.step
                self.begun = self.done + 1
                stopping.in_step = True
                yield batch
                stopping.in_step = False
                check_ended()
                self._count(before)
                self._end_turn(is_last=self.done == length)
                # before the next batch is read, after which a loader that is a part is further
                self._keep_before_last(length)
            if self.phase is Phase.STEPS and length is None:
                self._write()  # there was no telling which step would be the last

    def _find_virtual(self, networks: Sequence[nn.Module], of_loader: int) -> None:
        """Find the networks of virtual ranks; a UserError if the loader has other ranks."""
        found = []
        for network in map(replicas.in_ddp, networks):
            if isinstance(network, VirtualRanks):
                found.append(network)
        for of_network in {each.ranks for each in found} or {0}:
            if of_network != of_loader or 0 < len(found) < len(networks):
                raise UserError(
                    f"the training loader has virtual_ranks={of_loader}, {self.name}.steps got a "
                    f"model with {of_network}: use the same for both, and pass steps VirtualRanks"
                )
        self.ranks = of_loader or distributed.world_size()
        self.rank = distributed.rank()
        self.virtual = None
        VirtualRanks.in_step = ()  # of a loop that an error has ended, in a notebook
        if of_loader:
            optimizers = [
                part for part in self.parts.values() if isinstance(part, Optimizer)
            ]
            self.virtual = VirtualSteps(found, self._modules(), optimizers)
            self.draws_by_rank = True
            self.share_outside = 0

    def _modules(self) -> list[nn.Module]:
        """Return those that have a state of each virtual rank, besides the networks of a loop."""
        return [
            part
            for part in self.parts.values()
            # metrics add up what all ranks have seen
            if isinstance(part, nn.Module) and not states.is_metric(part)
        ]

    def _load_buffers(self) -> None:
        """Give the networks the buffers that each rank has had in the epoch that goes on."""
        for name, of_ranks in self.buffers.items():
            if len(of_ranks) == distributed.world_size():
                mine = of_ranks[distributed.rank()]
                states.load_module(self.parts[name], mine, strict=False)
        self.buffers.clear()

    def _begin_rank(self, rank: int) -> None:
        """Have what is drawn from here on be that rank's own, in this step."""
        self.rank = rank
        samples.seed(self.seed, self.epoch, self.done, rank * self.draws_by_rank)
        self.streams.clear()

    def _take_passes(self, batches: Iterable, count: int) -> Iterator:
        """Yield the batches of a step; those of a virtual rank begin with its random numbers.

        Before the first and after the last all processes draw alike, as a rank beyond all others.
        """
        if not self.virtual:
            yield from batches
            return
        thread = threading.current_thread()
        name = thread.name
        self.virtual.begin()
        for number, batch in enumerate(batches):
            rank = self.virtual.begin_pass(number, count)
            if rank != self.rank:
                self._begin_rank(rank)
            thread.name = f"virtual rank {rank} of {self.ranks}"  # for a debugger
            yield batch
        thread.name = name
        self.virtual.end()
        self._begin_rank(self.ranks)

    @contextlib.contextmanager
    def _in_loop(self) -> Iterator[None]:
        """The loop over steps of an epoch, or, without epochs, of a run."""
        if self.phase not in (Phase.OUTSIDE, Phase.EPOCH):
            raise UserError(
                f"second loop over {self.name}.steps in an epoch (without epochs: in a run): pass "
                "all batches to the first, such as itertools.chain(loader, other); to train by "
                f"iterations use steps(range(N)) and next({self.name}.forever(loader))"
            )
        is_alone = self.phase is Phase.OUTSIDE
        self.phase = Phase.ALONE if is_alone else Phase.STEPS
        # if it is left: in a notebook it may go on
        after = Phase.OUTSIDE if is_alone else Phase.AFTER
        try:
            with self._in_run() if is_alone else contextlib.nullcontext():
                yield
                if is_alone:
                    self._write_step()
                    go_on()
                    after = Phase.DONE
        finally:
            stopping.in_step = False
            if self.phase in IN_LOOP:  # not long after, when an iterator is thrown away
                self.phase = after
            if not is_alone:  # what is drawn after the steps
                samples.seed(self.seed, self.epoch, self.share_outside, 1, 0)

    def _keep_changes(self, is_over: bool = False) -> None:
        """Save again if parts were changed after an epoch was saved; to call on all ranks.

        What is changed before the first steps, by each start anew, is none, but gives a warning. So
        do networks after all epochs (is_over), as one that gets the best weights for a test.
        """
        then = self.saved_sums
        self.saved_sums = {}
        changed = distributed.from_rank_zero(
            lambda: [n for n, s in self._checksums(then).items() if s != then[n]]
        )
        if not changed:
            return
        if is_over and any(isinstance(self.parts[each], nn.Module) for each in changed):
            distributed.print0(
                f"{shorten(changed)} changed after the last epoch: the checkpoints keep what was"
            )
            return
        if self.epoch > self.first_epoch:
            self._save_again()
            return
        distributed.print0(
            f"warning: a scheduler or other object changed before {self.name}.steps(), which a run "
            "that resumes in this epoch repeats: fine if it sets values by the epoch; move "
            f"scheduler.step() to the end of the epoch, or before {type(self).__name__}(...)"
        )

    def _checksums(self, names: Iterable[str]) -> dict[str, int]:
        return states.checksums({name: self.parts[name].state_dict() for name in names})

    def _keep_before_last(self, length: int | None) -> None:
        """Save before an epoch's last optimizer step: what follows it may take long."""
        after = self.done + self.turns.period
        is_last = length is not None and 0 < self.done < length <= after
        is_to_keep = self.goes_on_after_last and self.phase is Phase.STEPS
        if is_to_keep and is_last and not self._is_between():
            self.phase = Phase.LAST_STEP
            self._write_step()
            note_kept(self._position())

    def _count(self, before: int) -> None:
        """Count a turn, before which `before` steps were done."""
        self.done += 1
        self.step += 1

    def _end_turn(self, is_last: bool) -> None:
        if self.step - self.first_step == 2:
            self.unsaved.say_networks()
            self._state()  # what a save refuses is refused now
        if self.save_every and self.step % self.save_every == 0:
            self.is_due = True
        if self.is_due and not self._is_between():
            self._write()
        try:
            end_step()
        except Stopped:  # raised again in each turn until the ranks leave
            # Resumed after its last step a loop would have no turn, for which few scripts
            # are written: the ranks leave at the end of the epoch.
            goes_on = self.goes_on_after_last and is_last
            if not goes_on and not self._is_between():
                self._leave()

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

    @property
    def common(self) -> random.Random:
        """What draws numbers that are the same on all ranks, in each step others."""
        return self._stream(0)

    @property
    def own(self) -> random.Random:
        """What draws numbers of this rank's own, in each step others."""
        return self._stream(1 + self.rank)

    def _stream(self, number: int) -> random.Random:
        if number not in self.streams:
            self.streams[number] = random.Random(
                samples.hash_key(self.seed, self.epoch, self.done, number, 1)
            )
        return self.streams[number]

    # What is saved.

    def save(self) -> None:
        """Write last.pt: within a step, or an epoch, at its end; to call on all ranks."""
        self.is_due = True
        if self.phase in self.settled:
            self._write()
            note_kept(self._position())

    def save_best(self, score: float, is_higher: bool = True) -> bool:
        """Write best.pt now if rank 0's `score` is the best so far; return whether it is.

        is_higher: whether a higher score is better. All ranks have to call it.
        """
        score = distributed.from_rank_zero(lambda: float(score))
        before = self.best_score
        is_better = before is None or (score > before if is_higher else score < before)
        if not is_better or math.isnan(score):
            return False
        self.best_score = score
        state = self._state(is_inside=self.phase not in self.settled)
        self.folder.add(state, is_best=True, is_last=False)
        self.save()
        return True

    def _write(self) -> None:
        self.is_due = False
        self.folder.add(self._state())

    def _write_step(self) -> None:
        """Write it unless this step is saved."""
        if self.folder.saved_step != self.step:
            self._write()

    def _save_again(self) -> None:
        """Nothing: an epoch is saved after all that the script does in it."""

    def _state(self, is_inside: bool = False) -> State:
        finite.check_weights(states.names_of(self.parts), self._here())
        self.unsaved.say_optimizers()
        taken = states.take_states(self.parts)
        return {
            "parts": taken,
            "of_ranks": states.compare_ranks(self.parts, taken),
            "kinds": states.kinds(self.parts),
            "resumed_from": self.folder.resume,
            "ranks": distributed.world_size(),
            "seed": self.seed,
            "draws_by_rank": self.draws_by_rank,
            "epoch": self.epoch,
            "done": self.done,
            "step": self.step,
            "is_inside": is_inside,
            **self.place,
            "best": self.best_score,
            "variables": self.variables.changes(self, self.parts, not self.done),
        }

    def _load(self, state: State) -> None:
        path = state["path"]
        line = progress_line(state, state["done"], "epoch(s)")
        place = self._place_line(state["done"], state.get("length", 0))
        distributed.print0(line + place)
        if state.get("is_inside"):
            distributed.print0(
                "it was saved within a step, or before the end of an epoch: what the script did "
                "there before saving is repeated"
            )
        saved = self._own_states(state, state["parts"])
        self._compare_names(path, saved.keys())
        states.load_states(saved, self.parts, state, TO_UNDO)
        self.epoch = state["epoch"]
        self.step = self.first_step = state["step"]
        self.done = state["done"]
        self.place = {name: state.get(name, 0) for name in UNKNOWN}
        self.best_score = state["best"]
        if self.done and state["seed"] != self.seed:
            self._start_over(f"the seed was {state['seed']}")

    def _place_line(self, done: int, steps: int = 0) -> str:
        """Return where the run goes on in an epoch, of which so many are done of all `steps`."""
        if not done:
            return ""
        where = "after its last step" if done == steps else f"at step {done + 1}"
        return (
            f"; resuming {where}; loop variables, enumerate and zip start over, except "
            f"{self.name}.numbers(...)"
        )

    def _own_states(self, state: State, saved: State) -> State:
        """Return the saved states of the parts, this rank's of those that each rank has its own.

        Those of parts that are made later are kept for them.
        """
        # of version 2, whose steps drew by rank whatever the seeds
        self.draws_by_rank = state.get("draws_by_rank", True)
        mine = dict(saved)
        for name, each in state.get("of_ranks", {}).items():
            if isinstance(self.parts.get(name), nn.Module):
                self.buffers[name] = each
            elif len(each) == distributed.world_size():
                mine[name] = each[distributed.rank()]
            else:
                raise UserError(
                    f"{state['path']}: {name} had a separate state on each of {len(each)} ranks: "
                    f"resume on that many ranks; {TO_UNDO}"
                )
        for name in list(mine):
            if is_later(name) and name not in self.parts:
                self.later[name] = mine.pop(name)
        return mine

    def _compare_names(self, path: str, then: Iterable[str]) -> None:
        """Raise a UserError if a part may have been renamed; report which are no parts any more."""
        left = sorted(set(then) - self.parts.keys())
        new = sorted(self.parts.keys() - set(then))
        if left and new:
            raise UserError(
                f"{path} has {shorten(left)} but no {shorten(new)}: use the previous names, or "
                "another folder, or resume='never'"
            )
        if left:
            distributed.print0(
                f"{path} has {shorten(left)}, which {self.name} was not given: ignored, and "
                "dropped from new checkpoints"
            )

    def _start_over(self, reason: str) -> None:
        distributed.print0(f"{reason}: the interrupted epoch starts over")
        self.done = 0

    def _rest(self, batches: Iterable, length: int | None) -> Iterator:
        """Return an iterator over what is left of the epoch's `batches`, `length` in all."""
        then = self.place
        now = self.place = {
            **UNKNOWN,
            "ranks": distributed.world_size(),
            "length": length or 0,
        }
        reason = ""  # why other batches would follow
        if isinstance(batches, loading.Loader) and batches.is_train:
            now["global_batch"] = batches.sampler.global_batch
            now["training_set"] = batches.sampler.order["training_set"]
            if then["global_batch"] != now["global_batch"]:
                reason = "the batch size or the number of ranks has changed"
                say_batches(
                    then["global_batch"],
                    now["global_batch"],
                    "batch_size x ranks x accumulate",
                    "the learning rate",
                )
            elif then["training_set"] not in (0, now["training_set"]):
                reason = "the training set has changed"
        elif not isinstance(batches, Sequence):
            if then["ranks"] != now["ranks"]:
                reason = f"the number of ranks was {then['ranks']}"
            elif then["length"] not in (0, now["length"]):
                reason = f"an epoch had {then['length']} steps, now {length}"
        if self.done and reason:
            self._start_over(reason)
        # A loader that is a part may have been given its place.
        is_resumed = self.step == self.first_step and any(
            part is batches for part in self.parts.values()
        )
        if self.virtual and isinstance(batches, loading.Loader):
            return self._grouped(batches)
        rest = self.reading.rest(batches, self.epoch, self.done, is_resumed=is_resumed)
        return itertools.islice(rest, length and max(length - self.done, 0))

    def _grouped(self, loader: loading.Loader) -> Iterator[Group]:
        """Yield the batches of each step that is left, of all virtual ranks of this process."""
        sampler = loader.sampler
        rest = loader.normalized(
            loader.raw(self.epoch, self.done * sampler.global_batch)
        )
        for _ in range(sampler.steps - self.done):
            yield Group(itertools.islice(rest, sampler.passes), self._take_passes)

    def _leave(self) -> NoReturn:
        self._write_step()
        how = (
            " with resume=auto (--resume auto)" if self.folder.resume == "never" else ""
        )
        exit_stopped(
            f"and saved at {self._position()}; run the same command again{how} to resume"
        )

    def _position(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.done}"

    def _here(self) -> str:
        """Return where this rank is when it hangs, also in a step that is not done."""
        return f"epoch {self.epoch + 1}, step {max(self.begun, self.done)}"


def is_later(name: str) -> bool:
    """Return whether a part of that name is made by `numbers` or `forever`."""
    return bool(re.fullmatch(rf"{NUMBERS}|{FOREVER}\d+", name))


def check_parts(door: str, parts: states.Parts) -> None:
    """Raise a UserError unless each part has what a checkpoint needs of it, on one rank.

    door: the class that is given them.
    """
    for name, part in parts.items():
        if states.is_metric(part):
            part.persistent(True)
        kinds = {kind.__name__ for kind in type(part).__mro__}
        if isinstance(part, nn.Module):
            for each in (*part.modules(), *part.parameters()):
                kinds.add(type(each).__name__)
        sharded = sorted(kinds & SHARDED)
        if sharded:
            raise UserError(
                f"{door}({name}=...): {sharded[0]} is sharded over the ranks: use "
                "DistributedDataParallel and a regular optimizer, or save it with "
                "torch.distributed.checkpoint"
            )
        for method in "state_dict", "load_state_dict":
            if not callable(getattr(part, method, None)):
                raise UserError(
                    f"{door}({name}=...): a {type(part).__name__} has no {method}: pass objects "
                    f"that have one; for numbers and lists use {door.lower()}.numbers(...)"
                )


def read_own(path: Path | str) -> State:
    """Return the checkpoint at `path`, tensors on the CPU.

    Raises a UserError if it cannot be read, or is none of Checkpoints.
    """
    state = checkpoint.read_file(path)
    checkpoint.check_entries(path, state, NEEDED.split(), "ddpkit.Checkpoints")
    return {**state, "path": str(path)}


def go_on() -> None:
    """After the last step all ranks go on, also if a signal has come to one of them."""
    try:
        agree()
    except Stopped:
        distributed.print0("all steps are done; running the rest of the script")
