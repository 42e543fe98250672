"""What is often forgotten in a training step, which a process's first two steps show."""

import torch
from torch import Tensor

from ddpkit.ranks import distributed, replicas
from ddpkit.run import checkpoint
from ddpkit.run.criterion import Criterion


class FirstSteps:
    """Watches the first two optimizer steps; reads the device in these.

    parts: of the run, by name. passes: of a step.
    """

    def __init__(
        self,
        parts: checkpoint.Parts,
        optimizer: torch.optim.Optimizer,
        criterion: Criterion | None,
        passes: int,
    ) -> None:
        self.parts = parts
        self.optimizer = optimizer
        self.passes = passes
        self.ended = 0  # steps
        # with the number of the batch's labels
        self.slopes: list[tuple[Tensor, Tensor]] = []
        self.scale = 1.0
        self.has_stepped = False
        self.is_cleared = False
        self.has_criterion = criterion is not None
        self.hooks = [optimizer.register_step_pre_hook(self._note_step)]
        if criterion is not None:
            self.hooks.append(
                criterion.register_forward_hook(self._watch_loss, with_kwargs=True)
            )

    def end_step(self, count: Tensor) -> None:
        """Raise a UserError, or say a line, if the step is wrong; count: of labels of all ranks."""
        self.ended += 1
        if self.ended == 1:
            self._check_first(count)
        if self.ended == 2:
            for hook in self.hooks:
                hook.remove()
            self._say_unsaved()

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        replicas.check_step(optimizer)
        self.has_stepped = True

    def _watch_loss(
        self, criterion: Criterion, inputs: tuple, named: dict, loss: Tensor
    ) -> None:
        if not loss.requires_grad:
            return
        if self.ended == 0:
            count = criterion.count(
                named["targets"] if "targets" in named else inputs[1]
            )
            loss.register_hook(lambda slope: self._note_slope(slope, count))
        else:
            loss.register_hook(self._check_cleared)

    def _note_slope(self, slope: Tensor, count: Tensor) -> None:
        self.slopes.append((slope, count))
        self.scale = self._scale()

    def _check_cleared(self, _: Tensor) -> None:
        if not self.is_cleared:  # of several batches, before the first
            replicas.check_cleared(self.optimizer)
        self.is_cleared = True

    def _scale(self) -> float:
        scalers = (
            part
            for part in self.parts.values()
            if isinstance(part, torch.amp.GradScaler)
        )
        return next(
            (scaler.get_scale() for scaler in scalers if scaler.is_enabled()), 1.0
        )

    def _check_first(self, count: Tensor) -> None:
        replicas.check_slopes(self.slopes, count, self.passes, self.scale)
        if self.has_criterion and not self.slopes:
            distributed.say(
                "warning: the loss did not come from criterion(...): a mean over one batch is "
                "not that over the labels of all ranks and passes of a step, which is loss = "
                "criterion(outputs, targets) * world_size / count; if yours is right, leave "
                "criterion out of Run(...)"
            )
        if not self.has_stepped and self._scale() == 1:  # fp16 leaves out some
            distributed.say(
                "warning: run.end_step without a step of the optimizer: a stop there loses the "
                "gradients so far; for several batches per step use --accumulate"
            )

    def _say_unsaved(self) -> None:
        if strays := checkpoint.strays(self.parts):
            distributed.say(
                f"warning: {strays} of the optimizer's weights are in no network that Run(...) was "
                "given by name, such as a loss: they are in no checkpoint, and differ by rank"
            )
        for kind in checkpoint.unsaved(self.parts):
            distributed.say(
                f"warning: {kind} is not given to Run(...) by name: its state is in no checkpoint, "
                "and a resumed run goes on without it"
            )
