"""How far a training run is, and the losses of its epoch so far."""

import torch
from torch import Tensor

from ddpkit.data.loading import TrainSampler
from ddpkit.data.other_loaders import OtherSource
from ddpkit.ranks import devices, distributed
from ddpkit.run.states import State


class Progress:
    """Counts epochs, optimizer steps and images; a resumed run goes on with its numbers.

    source: which says how many images a step and an epoch have. device: of the losses.

    epoch: epochs finished. step: optimizer steps taken. seen: images trained on in this epoch, on
    all ranks. totals: this rank's sum of losses in it, and their count, float64.
    """

    def __init__(
        self, source: TrainSampler | OtherSource, device: torch.device
    ) -> None:
        self.source = source
        self.device = device
        self.epoch = 0
        self.step = 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.seen = 0
        place = devices.for_sums(self.device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=place)
        # what is to be added to them, in the order of the steps, still on the device
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.logged = self.totals.clone()  # what the log has of them

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.steps_done}"

    @property
    def totals(self) -> Tensor:
        self._add_pending()
        return self.sums

    def _add_pending(self) -> None:
        share = 1 / distributed.world_size()
        for values in self.pending:
            for total, value in zip(self.sums, values, strict=True):
                total.add_(value.to(total.device), alpha=share)
        self.pending.clear()

    @property
    def steps_done(self) -> int:
        """Those of this epoch."""
        return self.seen // self.source.global_batch

    @property
    def steps_left(self) -> int:
        """Those of this epoch."""
        return (self.source.total - self.seen) // self.source.global_batch

    def resume(self, state: State) -> None:
        """Go on where the checkpoint was; if other batches would follow, at the epoch's start."""
        self.epoch = state["epoch"]
        self.step = state["step"]
        if not state["seen"]:
            return
        order = self.source.order
        has_other_steps = state["global_batch"] != self.source.global_batch
        reason = ""
        if isinstance(self.source, OtherSource) and has_other_steps:
            reason = "the training loader cannot continue with other ranks or batches"
        elif any(state.get(name) != value for name, value in order.items()):
            reason = "the images, --seed or the sampler have changed"
        if reason:
            distributed.print0(f"{reason}: the epoch starts over")
            return
        self.seen = state["seen"]
        totals = self.totals.new_tensor(state["totals"])  # (ranks of then, 2)
        if len(totals) == distributed.world_size():
            self.totals.add_(totals[distributed.rank()])
        elif distributed.is_rank_zero():
            self.totals.add_(totals.sum(0))
        self.logged = self.totals.clone()

    def schedule_step(self, state: State) -> int:
        """Return at which optimizer step a schedule goes on that follows the flags of now."""
        then = (state["images"], state["global_batch"], state["seen"])
        if then == (self.source.total, self.source.global_batch, self.seen):
            # What was, also if epochs have ended early.
            known = state["scheduler"].get("last_epoch")
            if known is not None:
                return known
        return self.epoch * self.source.steps + self.steps_done

    def count_step(self, loss: Tensor | float, count: Tensor) -> None:
        """Count a step, and its losses without reading the device.

        loss: whose mean over the ranks is that of the step. count: of the labels of all ranks.
        """
        if isinstance(loss, Tensor):
            loss = loss.detach()
        self.pending.append((loss * count, count))
        # To sums on the CPU they go when these are read: a copy in each step would wait.
        if self.sums.device == self.device:
            self._add_pending()
        self.step += 1
        self.seen += self.source.global_batch

    def loss_since_log(self) -> Tensor:
        """Return the mean loss over all ranks since the call before; all have to call it."""
        loss, count = distributed.reduce_tensor(self.totals - self.logged)
        self.logged = self.totals.clone()
        return loss / count

    def end_steps(self) -> None:
        """Leave out the rest of the epoch: a run that resumes starts with the next one."""
        self.seen = self.source.total

    def next_epoch(self) -> None:
        self.epoch += 1
        self._begin_epoch()


def progress_line(state: State, steps: int, of_epochs: str = "epochs") -> str:
    """Return what a checkpoint has: epochs, and `steps` of the next one."""
    line = f"{state['path']}: {state['epoch']} {of_epochs} done"
    if state.get("best") is not None and state["epoch"]:
        line += f", best {state['best']:.4f}"
    if steps:
        line += f" and {steps} step{'s' * (steps != 1)} of the next"
    return line
