"""Where a training run stands, to the step: counted here, saved by rank 0, taken up by all."""

import contextlib
import math
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from engine import checkpoint, distributed, stopping
from engine.distributed import UserError

SECONDS_BETWEEN_READINGS = 5  # of the loss, which waits for the device: not at every step


class Run:
    """What has been done so far.

    epoch: epochs finished. step: optimizer steps taken. seen: pictures trained on in the epoch that
    has begun, on all ranks. totals: float64 (2,), this rank's sum of losses in that epoch and what
    to divide it by. best: the best score. history: a row of metrics for each finished epoch.
    """

    def __init__(
        self,
        args: Namespace,
        classes: Sequence[str],
        pictures: int,
        device: torch.device,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LambdaLR,
        **more: Any,
    ) -> None:
        """Begin at nothing. `more`: what else has a state_dict and a load_state_dict, by name."""
        if taken := more.keys() & set(checkpoint.KEYS):
            raise ValueError(f"{taken}: checkpoints have an entry of that name already")
        self.args = args
        self.classes = list(classes)
        self.pictures = pictures
        self.parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **more}
        self.global_batch = args.batch_size * distributed.world_size() * args.accumulate
        self.epoch, self.step, self.seen, self.best = 0, 0, 0, -math.inf
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        self.history: list[dict[str, Any]] = []
        self.saved_step = 0
        self.read_at = time.monotonic()

    @property
    def passes(self) -> int:
        """How many batches each rank has trained on in the epoch that has begun."""
        return self.seen // self.global_batch * self.args.accumulate

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`, a checkpoint whose weights the model has already.

        On the number of ranks that wrote it to the very bit. The flags' learning rates and other
        settings hold, not those of `state`, and the schedule goes by epochs.
        """
        self.epoch, self.step, self.best = state["epoch"], state["step"], state["best"]
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
        for name, part in self.parts.items():
            if name not in ("model", "optimizer", "scheduler") and state.get(name):
                part.load_state_dict(state[name])
        steps = self.pictures // self.global_batch
        step = self.epoch * steps + self.seen // self.global_batch
        checkpoint.restore(state, self.parts["optimizer"], self.parts["scheduler"], step)

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
        totals = distributed.reduce_tensor(self.totals)
        self.check_loss(totals)
        loss, count = totals.tolist()
        return loss / max(count, 1)

    def end_epoch(self, row: dict[str, Any], score: float) -> bool:
        """Count an epoch, with its row of metrics; return whether `score` is the best so far."""
        self.epoch += 1
        self.seen = 0
        self.totals = torch.zeros_like(self.totals)
        self.history.append(row)
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
        states = {name: part.state_dict() for name, part in self.parts.items()}
        weights = self.parts["model"].named_parameters()
        if odd := [name for name, weight in weights if not weight.isfinite().all()]:
            raise UserError(f"{odd[0]} is not finite any more at {self}: {self._remedy()}")
        self.saved_step = self.step
        progress = {
            "epoch": self.epoch,
            "step": self.step,
            "seen": self.seen,
            "totals": totals.tolist(),
            "pictures": self.pictures,
            "best": self.best,
            "history": self.history,
            "classes": self.classes,
            "args": checkpoint.plain(self.args),
        }
        checkpoint.save(self.args.output_dir, {**states, **progress}, is_best, self.args.keep)

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
                stopping.leave(f"at {self}; the same command{but} goes on from there")

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.seen // self.global_batch}"
