"""A loss as a sum over labels, and their number."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpkit.errors import UserError
from ddpkit.ranks import devices
from ddpkit.run.outputs import Outputs, map_tensors, to_float32

SUM = "sum"
MEAN = "mean"
REGRESSIONS = nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss
WEIGHTED = nn.CrossEntropyLoss, nn.NLLLoss
ELEMENTWISE = *REGRESSIONS, nn.BCEWithLogitsLoss, nn.BCELoss


class Criterion(nn.Module):
    """Any loss, as the sum over the labels of a batch, and their number.

    Batches of unequal numbers of labels are added up, and divided once: loss = sum / count.

    loss: a function or module, (outputs, targets, ...) -> a scalar: a mean over the labels, such as
        nn.CrossEntropyLoss(), or a sum over them, such as nn.CrossEntropyLoss(reduction="sum").
        If it is neither, or labels are not what it divides by, it has a method `count(targets)`
        with what its sum is to be divided by, and returns the sum.
    reduction: "mean" or "sum", of a loss that has neither an attribute `reduction` nor `count`.
    classes: their names. Labels are class numbers, but not the loss's `ignore_index`; they count as
        much as the loss's `weight` says. Of other targets each number counts.

    A function, or a module around a loss, hides both: all labels from 0 to classes - 1 count one.

    Raises a UserError if nothing says which it is, or if the loss returns anything else.

        criterion = ddpkit.Criterion(nn.CrossEntropyLoss(ignore_index=255), classes).to(device)
        loss = criterion(outputs, targets) / criterion.count(targets)
    """

    def __init__(
        self,
        loss: Callable[..., object],
        classes: Sequence[str] = (),
        reduction: str = "",
    ) -> None:
        super().__init__()
        self.num_classes = len(classes)
        self.counts = getattr(loss, "count", None)
        self.is_regression = isinstance(loss, REGRESSIONS)
        self.unsaid = reduction
        self.loss = loss  # last: what is set after it may be an attribute of the loss
        if self.kind not in (SUM, MEAN):
            raise UserError(
                f'the loss in model.py has reduction="{self.kind}", not "mean" or "sum": pass '
                'ddpkit.Criterion(..., reduction="mean"), or "sum", if it returns that over the '
                "labels; otherwise return a sum, and define count(targets) to divide it by"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loss that has it, such as `label_smoothing`; else its own."""
        loss = vars(self).get("_modules", {}).get("loss")
        # what torch sets, as by compile(), is no setting of the loss
        is_own = name in vars(self) or name.startswith("_")
        if is_own or not hasattr(loss, name):
            super().__setattr__(name, value)
        else:
            setattr(loss, name, value)

    @property
    def kind(self) -> str:
        said = SUM if self.counts else getattr(self.loss, "reduction", None)
        return said or self.unsaid

    def forward(self, outputs: Outputs, targets: Any, *more: Any) -> Tensor:
        """Return the sum over the labels, a scalar."""
        outputs = to_float32(outputs)
        # of which torch would compare each output with each target
        is_paired = self.is_regression and isinstance(outputs, Tensor)
        if is_paired and outputs.shape != getattr(targets, "shape", outputs.shape):
            raise UserError(
                f"outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)}: make their "
                "shapes equal, such as by a target of shape (1,) in the dataset"
            )
        batch = [outputs, targets, *more]
        if self.kind == SUM:
            return self._call(batch)
        count = self.count(targets)
        # Of a batch without labels the mean is 0 / 0, and its gradient NaN.
        batch[0] = guarded(outputs, count)
        return torch.where(count > 0, self._call(batch) * count, 0.0)

    def count(self, targets: Any) -> Tensor:
        """Return the number of labels, or what they weigh, a scalar on the device of `targets`."""
        if self.counts:
            count = self.counts(targets)
            if isinstance(count, Tensor):
                return widened(count.detach())
            return torch.full((), count, device=getattr(targets, "device", None))
        if not isinstance(targets, Tensor):
            raise UserError(
                f"the labels of targets that are a {type(targets).__name__} cannot be counted: "
                "define count(targets) in the loss of model.py, and return the sum over the labels"
            )
        weight = None
        number = targets.numel()
        if isinstance(self.loss, WEIGHTED):
            weight = self.loss.weight
            if targets.is_floating_point() and weight is not None and self.kind == SUM:
                return widened((targets.movedim(1, -1) @ weight).sum())
        # of the classes
        has_shares = targets.ndim > 1 and targets.shape[1] == self.num_classes
        if has_shares and not isinstance(self.loss, ELEMENTWISE):
            number //= targets.shape[1]
        if targets.is_floating_point() or self.is_regression:
            return torch.full((), number, device=targets.device)
        is_label = self._are_labels(targets)
        if weight is None:
            return is_label.sum()
        return widened((weight[targets.where(is_label, 0)] * is_label).sum())

    def _are_labels(self, targets: Tensor) -> Tensor:
        # of torch's losses, for which any other is a label
        ignored = getattr(self.loss, "ignore_index", None)
        if ignored is not None:
            return targets != ignored
        if self.num_classes <= 1 and targets.ndim == 1:
            return torch.ones_like(targets, dtype=torch.bool)
        is_label = targets >= 0
        if self.num_classes:
            # a mask of one class has two numbers
            is_label &= targets < max(self.num_classes, 2)
        return is_label

    def _call(self, batch: Sequence[Any]) -> Tensor:
        """Return the loss of a `batch`: outputs, targets, and what it takes besides."""
        outputs = batch[0]
        try:
            found = self.loss(*batch)
        except (AttributeError, TypeError) as error:
            kind = type(outputs).__name__
            if isinstance(outputs, Tensor) or kind not in str(error):
                raise
            raise UserError(
                f"the loss does not accept the model's output, a {kind} ({error}): pass it "
                "ddpkit.to_logits(outputs)"
            ) from error
        what = type(found).__name__
        if isinstance(found, Tensor):
            if not found.ndim:
                return found
            what = f"a tensor {tuple(found.shape)}"
        raise UserError(
            f"the loss in model.py returns {what}: return a scalar tensor, the mean over the "
            "labels; or return the sum, and define count(targets) to return their number"
        )


def widened(number: Tensor) -> Tensor:
    """Return a float as float64, which adds up the counts of a step without rounding.

    Apple's GPUs have none.
    """
    is_exact = not number.is_floating_point() or number.device.type == devices.APPLE
    return number if is_exact else number.double()


def guarded(outputs: Outputs, count: Tensor) -> Outputs:
    """Return `outputs` such that a loss has no gradient there if its `count` is 0."""

    def guard(output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        # for other losses of the same outputs are not concerned
        alias = output.view_as(output)
        alias.register_hook(lambda slope: slope.where(count > 0, 0.0))
        return alias

    return map_tensors(guard, outputs)
