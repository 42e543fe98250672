"""Where a training run stands, to the step: counted here, saved by rank 0, taken up by all."""

import contextlib
import math
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves, tree_map_only

from engine.errors import UserError
from engine.ranks import distributed, stopping
from engine.run import checkpoint, optimizers

SECONDS_BETWEEN_READINGS = 5  # of the loss, which waits for the device: not at every step


class Run:
    """What has been done so far.

    epoch: epochs finished. step: optimizer steps taken. seen: pictures trained on in the epoch that
    has begun, on all ranks. totals: float64 (2,), this rank's sum of losses in that epoch and what
    to divide it by. best: the best score so far. best_of: what that is a score of, in words.
    history: a row of metrics for each finished epoch.
    """

    def __init__(
        self,
        args: Namespace,
        classes: Sequence[str],
        pictures: int,
        device: torch.device,
        score: str,
        validated_on: str,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        **more: Any,
    ) -> None:
        """Begin at nothing.

        score: the metric that decides which weights are the best. validated_on: the set that it is
        measured on, in words. more: what else has a state_dict and a load_state_dict, by name.
        """
        if taken := more.keys() & set(checkpoint.KEYS):
            raise ValueError(f"{taken}: checkpoints have an entry of that name already")
        self.args = args
        self.classes = list(classes)
        self.pictures = pictures
        self.parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **more}
        self.global_batch = args.batch_size * distributed.world_size() * args.accumulate
        self.epoch, self.step, self.seen = 0, 0, 0
        self.score = score
        self.best, self.best_of = -math.inf, f"{score} on {validated_on}"
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        self.history: list[dict[str, Any]] = []
        self.saved_step = 0
        self.proved: set[type] = set()  # what a saved file has been seen to load
        self.read_at = time.monotonic()

    @property
    def passes(self) -> int:
        """How many batches each rank has trained on in the epoch that has begun."""
        return self.seen // self.global_batch * self.args.accumulate

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from `state`, a checkpoint whose weights the model has already, if there is one.

        On the number of ranks that wrote it to the very bit. The flags' learning rates and other
        settings hold, not those of `state`, and the schedule goes by epochs; not so with a
        scheduler that is no LambdaLR.
        """
        folder = self.args.output_dir
        if state is None:
            self.best = distributed.from_rank_zero(checkpoint.read_best, folder, None, 0)
            return
        self.epoch, self.step = state["epoch"], state["step"]
        self.history = list(state["history"])
        order = (state["pictures"], state["args"]["seed"])
        if state["seen"] and order == (self.pictures, self.args.seed):
            self.seen = state["seen"]
            totals = torch.tensor(state["totals"], dtype=torch.float64)
            if len(totals) == distributed.world_size():
                self.totals += totals[distributed.rank()].to(self.totals.device)
            elif distributed.is_rank_zero():
                self.totals += totals.sum(0).to(self.totals.device)
        elif state["seen"]:
            distributed.say("other pictures or another --seed: the epoch begins anew")
        steps = self.pictures // self.global_batch
        step = self.epoch * steps + self.seen // self.global_batch
        then = state["pictures"], state["global_batch"], state["seen"]
        if then == (self.pictures, self.global_batch, self.seen):
            step = state["scheduler"].get("last_epoch", step)  # epochs may have been left early
        optimizers.restore(state, self.parts, step, self.args.epochs * steps)
        # One that was gone back to has no part in what followed it.
        until = math.inf if Path(state["path"]).name.startswith("last") else self.epoch
        best_of = self.best_of if checkpoint.is_in(folder, state["path"]) else None
        self.best = distributed.from_rank_zero(checkpoint.read_best, folder, best_of, until)

    def end_step(self) -> None:
        """Count an optimizer step; save if --save-every says so; stop here if all ranks are to."""
        self.step += 1
        self.seen += self.global_batch
        every = self.args.save_every
        if every and self.step % every == 0:
            self.save()
        elif (now := time.monotonic()) - self.read_at > SECONDS_BETWEEN_READINGS:
            self.read_at = now
            self.check_loss(self.totals)
        stopping.end_step()

    def mean_loss(self) -> float:
        """Return the mean loss of the epoch over all ranks."""
        is_early = self.pictures - self.seen >= self.global_batch
        if is_early and not distributed.all_arrive(f"left/{self.step}", distributed.timeout() / 10):
            raise UserError(
                f"rank {distributed.rank()} left the training loop at {self} and other ranks did "
                "not: all ranks have to take the same number of steps"
            )
        totals = distributed.reduce_tensor(self.totals)
        self.check_loss(totals)
        if is_early:  # what is left of the epoch is not for the next start
            self.seen = self.pictures
        loss, count = totals.tolist()
        return loss / max(count, 1)

    def end_epoch(self, row: dict[str, Any]) -> bool:
        """Count an epoch, with its row of metrics; return whether its score is the best so far."""
        if self.score not in row:
            raise UserError(f"BEST of model.py is {self.score}; there are {', '.join(row)}")
        self.epoch += 1
        self.seen = 0
        self.totals = torch.zeros_like(self.totals)
        self.history.append(checkpoint.plain(row))
        score = float(row[self.score])
        is_best = score > self.best
        self.best = max(self.best, score)
        return is_best

    def check_loss(self, totals: Tensor) -> None:
        """Raise a UserError unless the sums of losses, `totals` (..., 2), are finite."""
        if not totals.isfinite().all():
            raise UserError(f"the loss is not finite any more at {self}: {self._remedy()}")

    def _remedy(self) -> str:
        return (
            "a lower --lr or more --warmup-epochs may help, or a look at the pictures; "
            f"what is saved in {self.args.output_dir} is from before it"
        )

    def save(self, is_best: bool = False) -> None:
        """Write a checkpoint, on rank 0; every rank has to call it.

        Raises a UserError if it cannot be written, or if the loss or a weight is not finite.
        """
        totals = distributed.gather(self.totals)
        self.check_loss(totals)
        states: dict[str, Any] = {name: part.state_dict() for name, part in self.parts.items()}
        for name, part in self.parts.items():
            if not isinstance(part, nn.Module):  # a rate from np.cos, for one
                states[name] = tree_map_only(np.generic, lambda x: x.item(), states[name])
        kinds = {type(leaf) for leaf in tree_leaves(states)}
        weights = self.parts["model"].named_parameters()
        if odd := [name for name, weight in weights if not weight.isfinite().all()]:
            raise UserError(f"{odd[0]} is not finite any more at {self}: {self._remedy()}")
        progress = {
            "layout": optimizers.layout(self.parts),
            "epoch": self.epoch,
            "step": self.step,
            "seen": self.seen,
            "totals": totals.tolist(),
            "pictures": self.pictures,
            "global_batch": self.global_batch,
            "best": self.best,
            "best_of": self.best_of,
            "history": self.history,
            "classes": self.classes,
            "args": checkpoint.plain(vars(self.args)),
        }
        checkpoint.save(
            self.args.output_dir,
            {**states, **progress},
            is_best,
            self.args.keep,
            replace=self.saved_step == self.step,  # of the same weights, before evaluation
            prove=not kinds <= self.proved,
        )
        self.saved_step = self.step
        self.proved |= kinds

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Within the block a signal has all ranks stop after the same step, save, and end."""
        distributed.barrier()  # no rank fails before rank 0 has said what begins
        with stopping.on_signals(self.__str__):
            try:
                yield
                distributed.barrier()  # rank 0 may be saving: its thread needs the others'
            except stopping.Stopped:
                if self.saved_step != self.step:
                    self.save()
                but = " without --resume never" if self.args.resume == "never" else ""
                stopping.exit_stopped(f"at {self}; the same command{but} goes on from there")

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.seen // self.global_batch}"
