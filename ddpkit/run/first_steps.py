"""What is often forgotten in a training loop, which its first steps and epochs show."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddpkit.data.format import VOID
from ddpkit.ranks import distributed, replicas
from ddpkit.run import states
from ddpkit.run.criterion import Criterion

MOST_VOID = 0.7  # of a mask's pixels; more is said


class FirstSteps:
    """Watches the first two optimizer steps; reads the device in these.

    parts: of the run, by name. passes: of a step.
    """

    def __init__(
        self,
        parts: states.Parts,
        optimizer: torch.optim.Optimizer,
        criterion: Criterion | None,
        passes: int,
    ) -> None:
        self.parts = parts
        self.optimizer = optimizer
        self.passes = passes
        self.ended = 0  # steps
        # Of the criterion's sums, each with its batch's number of labels.
        self.slopes: list[tuple[Tensor, Tensor]] = []
        self.of_criterion: Tensor | float = 0.0  # in the first step's loss
        self.masks: list[Tensor] = []  # int64 (N, H, W)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)  # which scales by 1
        self.others: dict[str, torch.optim.Optimizer] = {}
        for name, part in parts.items():
            # the first that is enabled
            if isinstance(part, torch.amp.GradScaler) and not self.scaler.is_enabled():
                self.scaler = part
            if isinstance(part, torch.optim.Optimizer) and part is not optimizer:
                self.others[name] = part
        self.scale = 1.0  # in the first step
        self.is_cleared = False
        self.has_criterion = criterion is not None
        self.stepped: set[str] = set()  # names of the optimizers that have; "" is ours
        self.hooks = []
        for name, part in {"": optimizer, **self.others}.items():
            note = functools.partial(self._note_step, name)
            self.hooks.append(part.register_step_pre_hook(note))
        if criterion is not None:
            watch = criterion.register_forward_hook(self._watch_loss, with_kwargs=True)
            self.hooks.append(watch)

    def judge_step(self, loss: Tensor | float, count: Tensor | float) -> None:
        """Raise a UserError, or say a line, if the step is wrong.

        loss: of this rank's batches. count: of labels of all ranks.
        """
        self.ended += 1
        if self.ended == 1:
            self._check_first(loss, count)
        if self.ended == 2:
            for hook in self.hooks:
                hook.remove()
            waiting = self.others.keys() - self.stepped
            if waiting:
                names = ", ".join(sorted(waiting))
                distributed.print0(
                    f"{names}: no step in the first two of run.steps; right if it comes later"
                )

    def _note_step(self, name: str, *_: object) -> None:
        if not name:
            replicas.check_step(self.optimizer)
        self.stepped.add(name)

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
        is_number = isinstance(targets, Tensor) and not targets.is_floating_point()
        if is_number and targets.ndim == 3:
            self.masks.append(targets)
        count = criterion.count(targets, *inputs[2:])
        value = loss.detach()

        def note_slope(slope: Tensor) -> None:
            self.slopes.append((slope, count))
            self.scale = self.scaler.get_scale()
            self.of_criterion += slope * value / self.scale

        loss.register_hook(note_slope)

    def _check_cleared(self, before: list[tuple[Tensor, int]]) -> None:
        """Look at the gradients that there were when the loss was worked out."""
        if self.is_cleared:  # of several batches, before the first
            return
        self.is_cleared = True
        now = {id(each.grad) for each in replicas.weights_of(self.optimizer)}
        old = [each for each, version in before if each._version == version]
        replicas.check_cleared([each for each in old if id(each) in now])
        for name in sorted(self.others.keys() & self.stepped):
            if replicas.has_gradients(self.others[name]):
                distributed.print0(
                    f"{name}: the gradients of the step before are still there at backward(); "
                    "right only if its zero_grad() comes before its own backward()"
                )

    def _check_first(self, loss: Tensor | float, count: Tensor | float) -> None:
        replicas.check_slopes(self.slopes, count, self.passes, self.scale)
        seen = sum(float(own) for _, own in self.slopes)
        seen = sum(distributed.gather_objects(seen))
        if self.slopes and seen < 0.999 * float(count):
            distributed.print0(
                f"warning: the step counts {float(count):g} labels, and criterion(...) got "
                f"{seen:g}: where transform_batch removes labels, count those that it returns"
            )
        say_void(self.masks)
        self.masks.clear()
        if self.passes > 1 and self.slopes:
            whole = float(loss)
            part = float(self.of_criterion)
            if not math.isclose(whole, part, rel_tol=0.01):
                distributed.print0(
                    f"of the step's loss, {whole:.4g}, criterion(...) gave {part:.4g}: the rest is "
                    "right if it is mean / len(batches), or sum * world_size / count; a plain mean "
                    f"over each batch counts {self.passes} times"
                )
        if self.has_criterion and not self.slopes:
            distributed.print0(
                "warning: the loss did not come from criterion(...): a mean over one batch is "
                "not that over the labels of all ranks and passes of a step, which is loss = "
                "criterion(outputs, targets, ...) * world_size / count, with all that your loss "
                "takes; if yours is a sum over these, it is right"
            )
        if (
            "" not in self.stepped and self.scaler.get_scale() == 1
        ):  # fp16 leaves out some
            distributed.print0(
                "warning: run.end_step without a step of the optimizer: a stop there loses the "
                "gradients so far; for several batches per step use --accumulate"
            )


class LateChanges:
    """Watches for parts that a loop changes between the end of an epoch and its next steps.

    parts: of the run, by name. trained: the network whose weights are trained. trainable_then: how
        many were when the checkpoint was saved. is_within_epoch: whether a resumed run begins
        there.
    """

    def __init__(
        self,
        parts: states.Parts,
        trained: nn.Module,
        trainable_then: int,
        is_within_epoch: bool,
    ) -> None:
        self.parts = parts
        self.trained = trained
        self.trainable_then = trainable_then
        self.at_start = self._summary() if is_within_epoch else {}
        self.at_end: dict | None = None  # of the epoch: what its checkpoint has

    def trainable(self) -> int:
        return sum(weight.requires_grad for weight in self.trained.parameters())

    def before_steps(self) -> None:
        """Say a line if what was changed before the first steps will be wrong in a resumed run."""
        frozen = self.trainable_then - self.trainable()
        self.trainable_then = 0
        if frozen > 0:
            distributed.print0(
                f"warning: {frozen} weights are frozen that were trained when this run was "
                "stopped: what unfreezes them in an epoch has to do so, too, when the run resumes "
                "in a later one (epoch >= N, not ==)"
            )
        now = self._summary()
        if any(now[name] != each for name, each in self.at_start.items()):
            distributed.print0(
                "a scheduler or another part was changed before run.steps() in an epoch that is "
                "resumed in its middle, where it has been changed already: do that at the end of "
                "the loop, after run.end_epoch"
            )
        self.at_start = {}

    def note_saved(self) -> None:
        """Note the parts as they have been saved at the end of an epoch."""
        self.at_end = self._summary()

    def since_saved(self) -> bool:
        """Return whether a part has changed since `note_saved`, once; to call on all ranks."""
        then = self.at_end
        self.at_end = None
        if then is None:
            return False
        return distributed.from_rank_zero(lambda: self._summary() != then)

    def _summary(self) -> dict[str, int]:
        """Return on rank 0 what tells whether a part has changed."""
        if not distributed.is_rank_zero():
            return {}
        return {
            name: states.checksum(part.state_dict())
            for name, part in self.parts.items()
        }


def say_void(targets: Sequence[Tensor]) -> None:
    """Say a line if most pixels of some masks, (..., H, W) as training has them, are void."""
    total = sum(each.numel() for each in targets)
    void = sum(int((each == VOID).sum()) for each in targets)
    if void > MOST_VOID * total:
        distributed.print0(
            f"{void / total:.0%} of the pixels that training sees are void and count nothing: try "
            "a smaller --image-size, unless the masks have as few labels"
        )
