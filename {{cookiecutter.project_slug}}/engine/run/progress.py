"""The progress of a training run, to the step: counted, saved by rank 0, resumed by all ranks."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from engine.data.sources import Foreign, Own
from engine.errors import UserError
from engine.ranks import distributed, explaining, lockstep, positions, stopping
from engine.run import checkpoint, optimizers, palette, replay, sharded
from engine.run.checkpoint import OTHER_RUN, State
from engine.run.folder import KEYS, OF_PARTS, Folder
from engine.run.metrics import Totals
from engine.run.optimizers import Stateful

SECONDS_BETWEEN_CHECKS = 5  # of the loss; reading it at every step would stall the device


class Progress:
    """The progress of a run, and the parts that a checkpoint saves with it.

    epoch: epochs finished. step: optimizer steps taken. seen: images trained on in the current
    epoch, over all ranks. totals: this rank's losses of that epoch. best: the best score so far.
    best_of: its metric and validation set, as text. history: metrics of each finished epoch.
    """

    def __init__(
        self,
        folder: Folder,
        source: Own | Foreign,
        *,
        best_of: str,
        classes: Sequence[str],
        epochs: int,
        accumulate: int,
        save_every: int,
        score: str,
        flags: Mapping[str, object],
        format: Mapping[str, object],
        channels: int,
        parts: Mapping[str, Stateful],
    ) -> None:
        """Start at step 0.

        best_of: the metric that decides which weights are the best, and on what, as text. flags,
        format: saved with each checkpoint. parts: with a state_dict and a load_state_dict, by name.
        """
        if taken := parts.keys() & {*KEYS, "sampler", "loader"} - {*OF_PARTS}:
            raise UserError(f"Run({min(taken)}=...): checkpoints have an entry of that name")
        self.folder, self.source = folder, source
        self.global_batch, self.passes_per_step = source.global_batch, accumulate
        replay.check(folder.replay, epochs, source.steps)
        self.classes, self.epochs = classes, epochs
        self.save_every, self.score = 1 if folder.replay else save_every, score
        self.flags, self.format = (checkpoint.to_plain(dict(each)) for each in (flags, format))
        self.channels, self.parts = channels, dict(parts)
        self.network = cast(nn.Module, parts["model"])  # whose weights are saved
        self.epoch, self.step, self.seen, self.saved_step = 0, 0, 0, 0
        self.best_of = best_of
        self.best, self.totals = -math.inf, Totals(next(self.network.parameters()).device)
        self.history: list[dict[str, float | str]] = []
        self.checksum = lockstep.Checksum()
        self.verified: set[type] = set()  # types that have been read back from a file
        self.checked_at = time.monotonic()

    @property
    def passes(self) -> int:
        """Return how many passes of the current epoch are done, counting whole steps only."""
        return self.seen // self.global_batch * self.passes_per_step

    def resume(self, state: State | None) -> None:
        """Open the folder for training; continue from the checkpoint `state` if there is one.

        The model has its weights already. With as many ranks as wrote it, the run continues as if
        it had not stopped, to the bit. Learning rates and other settings of the optimizer come from
        the flags, except rates that were set by hand, and with a scheduler other than LambdaLR.
        """
        if state is not None:
            self._check_kind(state)
        self.folder.open_for_training(is_new=state is None)
        if state is None:
            self.best = distributed.from_rank_zero(self.folder.best_score, None, 0)
        else:
            distributed.say(self._differences(state))
            self._take_position(state)
            last_step = self.epochs * self.source.steps
            optimizers.load_states(state, self.parts, self._schedule_step(state), last_step)
            # After going back to an earlier checkpoint, a best.pt from later epochs does not count.
            path = state["path"]
            is_newest = Path(path).name.startswith("last") and path != self.folder.resume
            until = math.inf if is_newest else self.epoch
            best_of = self.best_of if self.folder.contains(state["path"]) else None
            self.best = distributed.from_rank_zero(self.folder.best_score, best_of, until)
            for name in ("model", "optimizer", "trained"):  # they take as much memory again
                state.pop(name, None)

    def _check_kind(self, state: State) -> None:
        """Raise a UserError if the checkpoint's weights are an average, or of other images."""
        path, is_average = state["path"], "trained" in state
        if is_average != ("trained" in self.parts):
            was, now = ("with", "without") if is_average else ("without", "with")
            raise UserError(f"{path} was trained {was} --ema, not {now}: {OTHER_RUN}")
        for name, value in self.format.items():
            if name != "max_megapixels" and (then := state["format"].get(name)) != value:
                raise UserError(
                    f"{path} was trained with {name} {then} in data.json, not {value}: {OTHER_RUN}"
                )

    def _take_position(self, state: State) -> None:
        self.epoch, self.step = state["epoch"], state["step"]
        self.history = list(state["history"])
        if not state["seen"]:
            return
        saved = state.get("loader") or []
        if not self.source.is_exact or (saved and len(saved) != distributed.world_size()):
            distributed.say(
                "the training loader cannot continue in mid-epoch: the epoch starts over"
            )
            return
        if saved and isinstance(self.source, Foreign):
            self.source.saved = [saved[distributed.rank()]]
        now = self.source.order
        order = {**now, "sampler": "shuffle", **state}  # older checkpoints do not know all of it
        if any(order[name] != value for name, value in now.items()):
            distributed.say("the images, --seed or --sampler have changed: the epoch starts over")
            return
        self.seen = state["seen"]
        totals = self.totals.loss.new_tensor(state["totals"])
        if len(totals) == distributed.world_size():
            self.totals.add(*totals[distributed.rank()])
        elif distributed.is_rank_zero():
            self.totals.add(*totals.sum(0))

    def _schedule_step(self, state: State) -> int:
        then = state["images"], state["global_batch"], state["seen"]
        step = self.epoch * self.source.steps + self.seen // self.global_batch
        if then == (self.source.total, self.global_batch, self.seen):
            step = state["scheduler"].get("last_epoch", step)  # epochs may have been left early
        return step

    def _differences(self, state: State) -> str:
        """Return a line about the checkpoint's progress and what has changed since."""
        ranks_then, batch_then = len(state["totals"]), state["global_batch"]
        ranks, batch = distributed.world_size(), self.global_batch
        line = f"{state['path']}: {state['epoch']} of {self.epochs} epochs done"
        if state["epoch"]:
            line += f", best {state['best']:.4f}"
        if state["seen"]:
            steps = state["seen"] // batch_then
            line += f" and {steps} step{'s' * (steps != 1)} of the next"
        if ranks_then != ranks:
            effect = "the same images in the same order, but BatchNorm, dropout and rounding differ"
            line += f"; {ranks_then} rank(s) then, {ranks} now: {effect}"
        if batch_then != batch:
            sizes = "global batch (--batch-size x ranks x --accumulate)"
            line += f"; {sizes} was {batch_then}, is {batch}"
        changed = checkpoint.changes(state["args"], self.flags)
        return f"{line}; changed: {changed}" if changed else line

    def is_due(self, i: int) -> bool:
        """Return whether the step to replay begins with pass `i` of the epoch."""
        return self.folder.replay == (self.epoch + 1, i / self.passes_per_step + 1)

    def end_step(self) -> None:
        """Count an optimizer step; save if that is due; raise Stopped if all ranks are to stop."""
        self.step += 1
        self.seen += self.global_batch
        if self.save_every and self.step % self.save_every == 0:
            self.save()
        elif (now := time.monotonic()) - self.checked_at > SECONDS_BETWEEN_CHECKS:
            self.checked_at = now
            self._check_loss(self.totals.compute())
        stopping.end_step()

    def mean_loss(self) -> float:
        """Return the mean loss of the epoch over all ranks."""
        is_early = self.source.total - self.seen >= self.global_batch
        if is_early and not positions.all_arrive(f"left/{self.step}", distributed.timeout() / 10):
            raise UserError(
                f"rank {distributed.rank()} left the training loop at {self} and other ranks did "
                "not: all ranks have to take the same number of steps"
            )
        totals = distributed.reduce_tensor(self.totals.compute())
        self._check_loss(totals)
        if is_early:  # a resumed run starts with the next epoch
            self.seen = self.source.total
        loss, count = totals.tolist()
        return loss / count if count else 0.0  # class weights may make it small

    def check_score(self, row: Mapping[str, float | str]) -> None:
        """Raise a UserError unless the metric that decides which weights are the best is there."""
        if self.score not in row:
            raise UserError(f"BEST of model.py is {self.score}: use one of {', '.join(row)}")

    def end_epoch(self, row: dict[str, float | str]) -> bool:
        """Record a finished epoch and its metrics; return whether its score is the best so far."""
        self.check_score(row)
        self.epoch += 1
        row = {"epoch": self.epoch, "step": self.step, **row}
        self.seen = 0
        self.totals = Totals(self.totals.loss.device)
        self.history.append(checkpoint.to_plain(row))
        score, before = float(row[self.score]), self.best
        self.best = max(before, score)
        return score > before

    def save(self, is_best: bool = False) -> None:
        """Write a checkpoint, on rank 0; every rank has to call it.

        Raises a UserError if it cannot be written, or if the loss or a weight is not finite.
        """
        totals = explaining.gather(self.totals.compute(), self.checksum)
        self._check_loss(totals)
        names, weights = zip(*self.network.named_parameters(), strict=True)
        if not all(finite := sharded.are_finite(weights)):
            raise self._not_finite(names[finite.index(False)], distributed.rank())
        states: State = {n: sharded.whole(part.state_dict()) for n, part in self.parts.items()}
        for name, part in self.parts.items():
            if not isinstance(part, nn.Module):  # such as a rate from np.cos
                states[name] = tree_map_only(np.generic, lambda x: x.item(), states[name])
        types = {type(leaf) for leaf in tree_leaves(states)}
        position = {
            "layout": optimizers.layout(self.parts),
            "epoch": self.epoch,
            "step": self.step,
            "seen": self.seen,
            "totals": totals.tolist(),
            **self.source.order,
            "global_batch": self.global_batch,
            "best": self.best,
            "best_of": self.best_of,
            "history": self.history,
            "classes": list(self.classes),
            "colors": palette.colors_of(self.classes).tolist(),
            "resumed_from": self.folder.resume,
            "args": self.flags,
            "format": self.format,
            "channels": self.channels,
        }
        if loader := self.source.state():
            position["loader"] = loader
        # The save after evaluation replaces the one before it, which has the same weights.
        replace, verify = self.saved_step == self.step, not types <= self.verified
        self.folder.add({**states, **position}, is_best, replace, verify)
        self.saved_step = self.step
        self.verified |= types

    def _check_loss(self, totals: Tensor) -> None:
        """Raise a UserError unless the sums of losses, (2,) or (ranks, 2), are finite."""
        if not (fine := totals.isfinite().all(-1)).all():
            rank = int(fine.int().argmin()) if fine.ndim else distributed.rank()
            raise self._not_finite(f"the loss of rank {rank}" if fine.any() else "the loss", rank)

    def _not_finite(self, what: str, rank: int) -> replay.NotFinite:
        position = self.epoch + 1, self.seen // self.global_batch or 1
        return replay.NotFinite(what, position, rank, self.folder.path)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Within the block a signal makes all ranks stop after the same step, save and exit."""
        distributed.barrier()  # lets rank 0 print the start lines before any rank can fail
        with stopping.on_signals(self.__str__):
            try:
                yield
                distributed.barrier()  # rank 0 may still be saving: its watcher needs the others'
            except stopping.Stopped:  # on all ranks; lockstep: ok
                if self.saved_step != self.step:
                    self.save()
                but = " without --resume never" if self.folder.resume == "never" else ""
                stopping.exit_stopped(f"at {self}; run the same command{but} to continue")

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.seen // self.global_batch}"
