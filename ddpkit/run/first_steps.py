"""What is often forgotten in a training loop, which its first steps and epochs show."""

import math
import warnings
from collections.abc import Collection, Sequence

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpkit.errors import UserError
from ddpkit.ranks import distributed, replicas
from ddpkit.run import states
from ddpkit.run.criterion import Criterion
from ddpkit.run.unsaved import with_inner


class FirstSteps:
    """Watches the first three optimizer steps; reads the device in these.

    parts: of the run, by name. passes: of a step, on each of the ranks. stepped: the optimizers
        that have taken a step; others may come.
    """

    def __init__(
        self,
        parts: states.Parts,
        optimizer: Optimizer,
        criterion: Criterion | None,
        passes: int,
        ranks: int,
        stepped: Collection[Optimizer],
    ) -> None:
        self.optimizer = optimizer
        self.passes = passes
        self.ranks = ranks
        self.stepped = stepped
        self.ended = 0  # steps
        # Of the criterion's sums, each with its batch's number of labels.
        self.slopes: list[tuple[Tensor, Tensor]] = []
        self.of_criterion: Tensor | float = 0.0  # in the first step's loss
        self.scale = 1.0  # of the gradients, in the first step
        self.is_cleared = False
        self.has_criterion = criterion is not None
        scalers = [part for part in parts.values() if isinstance(part, GradScaler)]
        self.scalers = [each for each in scalers if each.is_enabled()]
        if self.scalers:  # which skip the first steps of fp16
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        # not the optimizer's own, which one by hand may lack
        self.hooks = [register_optimizer_step_pre_hook(self._check_step)]
        if criterion is not None:
            watch = criterion.register_forward_hook(self._watch_loss, with_kwargs=True)
            self.hooks.append(watch)

    def judge_step(
        self, losses: Sequence[Tensor | float], count: Tensor | float
    ) -> None:
        """Raise a UserError, or print a line, if the step is wrong.

        losses: of this rank's batches. count: of labels of all ranks.
        """
        self.ended += 1
        self.is_cleared = False
        if self.ended == 1:
            self._check_first(sum(map(float, losses)), count)
        if self.ended == 3:  # by then gradients that are added up over steps have shown
            for hook in self.hooks:
                hook.remove()

    def _watch_loss(
        self, criterion: Criterion, inputs: tuple, named: dict, loss: Tensor
    ) -> None:
        if not loss.requires_grad:
            return
        if self.ended:
            # What is nearer to the loss has this step's gradients by then.
            grads = [weight.grad for weight in replicas.weights_of(self.optimizer)]
            before = [(each, each._version) for each in grads if each is not None]
            loss.register_hook(lambda _: self._check_cleared(before))
            return
        targets = named["targets"] if "targets" in named else inputs[1]
        count = criterion.count(targets)
        value = loss.detach()

        def note_slope(slope: Tensor) -> None:
            self.slopes.append((slope, count))
            for scaler in self.scalers[:1]:
                self.scale = scaler.get_scale()
            self.of_criterion += slope * value / self.scale

        loss.register_hook(note_slope)

    def _check_step(self, optimizer: Optimizer, args: tuple, named: dict) -> None:
        # a closure, as of LBFGS, works them out
        if args[1:] or named or optimizer not in with_inner(self.optimizer):
            return
        if all(weight.grad is None for weight in replicas.weights_of(optimizer)):
            raise UserError(
                "no weight has a gradient at optimizer.step(): call backward() on the loss, and "
                "zero_grad() after the step, not before"
            )

    def _check_cleared(self, before: list[tuple[Tensor, int]]) -> None:
        """Raise a UserError if gradients that there were as the loss was worked out are not 0."""
        if self.is_cleared:  # of several batches, before the first
            return
        self.is_cleared = True
        now = {id(each.grad) for each in replicas.weights_of(self.optimizer)}
        old = [each for each, version in before if each._version == version]
        if any(each.any() for each in old if id(each) in now):
            raise UserError(
                "the gradients of the previous step are still set at backward(): zero_grad() "
                "belongs after each optimizer step; to add up batches pass accumulate=N to the "
                "training loader"
            )

    def _check_first(self, whole: float, count: Tensor | float) -> None:
        replicas.check_slopes(self.slopes, count, self.passes, self.ranks, self.scale)
        seen = sum(float(own) for _, own in self.slopes)
        seen = sum(distributed.gather_objects(seen))
        if self.slopes and seen < 0.999 * float(count):
            distributed.print0(
                f"warning: the step counts {float(count):g} labels, but criterion(...) got "
                f"{seen:g}: if transform_batch removes labels, count the targets that it returns"
            )
        if self.passes > 1 and self.slopes:
            part = float(self.of_criterion)
            if not math.isclose(whole, part, rel_tol=0.01):
                distributed.print0(
                    f"warning: only {part:.4g} of the step's loss, {whole:.4g}, came from "
                    "criterion(...): scale the rest as mean / len(batches) or sum * world_size / "
                    f"count; a plain mean per batch counts {self.passes} times"
                )
        if self.has_criterion and not self.slopes:
            distributed.print0(
                "warning: the loss did not come from criterion(...): the mean over one batch is "
                "not the mean over all labels of the step: write loss = criterion(outputs, "
                "targets, ...) * world_size / count, with all arguments of your loss; ignore this "
                "if yours already sums over all batches and ranks"
            )
        # or the one within, as of SAM, whose own step() nobody calls
        has_stepped = any(each in self.stepped for each in with_inner(self.optimizer))
        if not self.scalers and not has_stepped:  # fp16 leaves out some
            distributed.print0(
                "warning: run.end_step without an optimizer step: a stop here loses the "
                "accumulated gradients; for several batches per step use --accumulate"
            )
