"""What --loss can name. Each term is defined for one image, so that a sum over images is the same
however these are grouped in batches, passes and ranks. Void pixels are in none of the terms.

A loss of the whole data is sum(n * term) / sum(n), where n is the number of an image's labelled
pixels, or with --class-weights the sum of the weights of their classes.
"""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from engine.run import machine
from masks import VOID


@dataclass
class Batch:
    """What the terms are made of; they share what is worked out."""

    outputs: Tensor  # float32 (N, classes, H, W), logits
    targets: Tensor  # int64 (N, H, W)
    class_weights: Tensor | None  # float32 (classes,)
    smoothing: float

    @cached_property
    def weights(self) -> Tensor:
        """(N, H, W): 1, or the weight of the class; 0 where void."""
        is_labelled = self.targets != VOID
        if self.class_weights is None:
            return is_labelled
        return self.class_weights[self.targets.where(is_labelled, 0)] * is_labelled

    @cached_property
    def counts(self) -> Tensor:
        """(N,): the sum of `weights` of each image."""
        return self.weights.flatten(1).sum(1)

    @cached_property
    def cross_entropy(self) -> Tensor:
        """(N, H, W), with weights and smoothing; 0 where void."""
        # reduction="sum" is not deterministic on GPUs.
        return cross_entropy(
            *(self.outputs, self.targets, self.class_weights),
            ignore_index=VOID,
            reduction="none",
            label_smoothing=self.smoothing,
        )

    @cached_property
    def probability(self) -> Tensor:
        """(N, H, W): the softmax of the true class; 1 where void."""
        losses = cross_entropy(self.outputs, self.targets, ignore_index=VOID, reduction="none")
        return (-losses).exp()


def one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return bool (N, classes, H, W); void pixels are of no class."""
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    return targets[:, None] == classes[:, None, None]


def bce(batch: Batch) -> Tensor:
    """Return the binary cross-entropy (N, H, W), each class against the rest, mean over classes.

    Smoothing as in timm's BinaryCrossEntropy.
    """
    truth = one_hot(batch.outputs, batch.targets).float()
    truth = truth * (1 - batch.smoothing) + batch.smoothing / truth.shape[1]
    losses = binary_cross_entropy_with_logits(batch.outputs, truth, reduction="none")
    return losses.mean(1) * batch.weights


def focal(batch: Batch) -> Tensor:
    """Return the focal loss (N, H, W), softmax, gamma 2: Lin et al. 2017, arXiv:1708.02002."""
    return (1 - batch.probability) ** 2 * batch.cross_entropy


def ohem(batch: Batch) -> Tensor:
    """Return the cross-entropy (N, H, W) of the hardest pixels, so that its mean is their mean.

    Those whose class has a probability of less than 0.7, and at least 1/16 of an image, as in
    TorchSeg and mmsegmentation, which take them of a batch.
    """
    is_labelled, p = batch.targets != VOID, batch.probability.detach()
    easiest_last = p.where(is_labelled, 2).flatten(1).sort().values
    least = easiest_last.gather(1, is_labelled.flatten(1).sum(1, keepdim=True) // 16)
    is_hard = is_labelled & (p <= least.clamp(min=0.7)[..., None])
    kept = (batch.weights * is_hard).flatten(1).sum(1)
    scale = (batch.counts / kept).where(kept > 0, 0)
    return batch.cross_entropy * is_hard * scale[:, None, None]


def mean_over_present(losses: Tensor, is_present: Tensor) -> Tensor:
    """Return the means over the last dimension, the classes; 0 where none is present."""
    return (losses * is_present).sum(-1) / is_present.sum(-1).clamp(min=1)


def dice(batch: Batch) -> Tensor:
    """Return the Dice loss (N,), for each image the mean over the classes that it has.

    Background is a class, too. Milletari et al. 2016, arXiv:1606.04797; smp's DiceLoss takes the
    mean over all classes, in which absent ones are 0.
    """
    truth = one_hot(batch.outputs, batch.targets).flatten(2)  # (N, classes, pixels)
    is_labelled = (batch.targets != VOID).flatten(1)[:, None]
    shares = batch.outputs.softmax(1).flatten(2) * is_labelled
    total = shares.sum(2) + truth.sum(2)
    losses = 1 - 2 * (shares * truth).sum(2) / total.clamp(min=1e-7)
    return mean_over_present(losses, truth.any(2))


def lovasz(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the Lovász-Softmax loss of one image, the mean over the classes that it has.

    Berman et al. 2018, arXiv:1705.08790. smp's waits for the GPU several times per image, and fails
    on one that is all void.
    """
    truth = one_hot(outputs, targets).flatten(2)[0]  # (classes, pixels)
    errors = (truth.float() - outputs.softmax(1).flatten(2)[0]).abs()
    errors = errors * (targets != VOID).flatten()  # so void comes last and adds nothing
    with torch.no_grad():
        order = errors.argsort(stable=True, dim=1, descending=True)
        is_true = truth.gather(1, order)
        found = is_true.cumsum(1)
        total = found[:, -1:]
        union = total + (~is_true).cumsum(1)
        # By how much each pixel raises the Jaccard loss, 1 - (total - found) / union. Differences
        # of that would have lost half of their digits.
        if_false = (total - found) / (union * (union - 1)).clamp(min=1)
        slopes = if_false.where(~is_true, 1 / union)
        slopes = torch.zeros_like(slopes).scatter(1, order, slopes)
    return mean_over_present((errors * slopes).sum(1), truth.any(1))


def per_image(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Batch], Tensor]:
    """Return a term of a loss of one image: (1, classes, H, W), (1, H, W) -> scalar."""

    def term(batch: Batch) -> Tensor:
        images = zip(batch.outputs.split(1), batch.targets.split(1), strict=True)
        return torch.stack([loss(*image) for image in images])

    return term


OF_PIXELS: dict[str, Callable[[Batch], Tensor]] = {
    "ce": lambda batch: batch.cross_entropy,
    "bce": bce,
    "focal": focal,
    "ohem": ohem,
}
OF_IMAGES: dict[str, Callable[[Batch], Tensor]] = {  # another one, for example:
    "dice": dice,  # per_image(smp.losses.TverskyLoss("multiclass", ignore_index=VOID, alpha=0.3))
    "lovasz": per_image(lovasz),
}


def parse(text: str) -> list[tuple[float, str]]:
    """Return the factors and names of terms such as ce+0.5*dice."""
    terms = []
    for part in text.split("+"):
        factor, _, name = part.strip().rpartition("*")
        try:
            terms.append((float(factor or 1), name))
        except ValueError:
            terms.append((math.nan, name))
    return terms


def terms(text: str) -> str:
    """Check the value of --loss."""
    names = [*OF_PIXELS, *OF_IMAGES]
    if not all(name in names and 0 < factor < math.inf for factor, name in parse(text)):
        known = ", ".join(names)
        raise ArgumentTypeError(f"{text}: expected {known}, or a sum such as ce+0.5*dice")
    return text


def build(
    loss: str, smoothing: float, class_weights: tuple[float, ...] | None
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the loss: (logits, int64 (N, H, W)) -> (sum over pixels, number of pixels).

    With class_weights a pixel counts as much as its class weighs, as torch's mean does.
    """
    parts = parse(loss)

    def criterion(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weights = machine.constant(class_weights, outputs.device) if class_weights else None
        batch = Batch(outputs, targets, weights, smoothing)
        sums = []
        for factor, name in parts:
            if name in OF_PIXELS:
                total = OF_PIXELS[name](batch).sum()
            else:
                total = (batch.counts * OF_IMAGES[name](batch)).sum()
            sums.append(total if factor == 1 else factor * total)
        loss = torch.stack(sums).sum() if len(sums) > 1 else sums[0]
        return loss, batch.counts.sum()

    return criterion
