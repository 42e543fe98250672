"""The loss: sum(n * term) / sum(n) over all images, where n is the number of an image's labelled
pixels, with --class-weights the sum of their weights. Each term is defined for one image, so that
it is the same however images are grouped in batches, passes and ranks. Void pixels are in none.
"""

import functools
import re

import torch
from torch import Tensor, nn

import ddpkit
from dataset import VOID

# "sum" would not be deterministic on GPUs.
cross_entropy = functools.partial(
    nn.functional.cross_entropy, reduction="none", ignore_index=VOID
)


class Loss(nn.Module):
    """What --loss says: (logits (N, classes, H, W), int64 (N, H, W)) -> the sum over pixels.

    text: a sum of terms, such as ce+0.5*dice. smoothing: of labels, in ce and focal.
    weights: of the classes; a pixel counts as much as its class weighs, as in torch's mean.
    """

    weights: Tensor | None

    def __init__(
        self, text: str, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.register_buffer("weights", weights)
        self.terms = []
        known = {
            "ce": self.cross_entropy,
            "focal": self.focal,
            "dice": dice,
            "lovasz": lovasz,
        }
        for part in text.split("+"):
            factor, _, name = part.strip().rpartition("*")
            is_number = re.fullmatch(r"\d*\.?\d+|", factor)
            weight = float(factor or 1) if is_number else 0.0
            if weight == 0 or name not in known:
                raise ddpkit.UserError(
                    f"--loss {text}: use {', '.join(known)} or ce+0.5*dice"
                )
            self.terms.append((weight, known[name]))

    def counts(self, targets: Tensor) -> Tensor:
        """Return (N,), the number of labelled pixels of each image, or what they weigh."""
        is_labelled = targets != VOID  # (N, H, W)
        if self.weights is None:
            return is_labelled.flatten(1).sum(1)
        weights = self.weights[targets.where(is_labelled, 0)]
        return (weights * is_labelled).flatten(1).sum(1)

    def count(self, targets: Tensor) -> Tensor:
        """Return what the sum over `targets` is to be divided by."""
        return self.counts(targets).sum()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        total = outputs.new_zeros(())
        for factor, term in self.terms:
            # (N, H, W) of pixels, or (N,) of images
            losses = term(outputs, targets)
            if losses.ndim == 1:
                losses = losses * self.counts(targets)
            total = total + factor * losses.sum()
        return total

    def cross_entropy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(
            outputs, targets, self.weights, label_smoothing=self.smoothing
        )

    def focal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Lin et al. 2017, arXiv:1708.02002, with softmax and gamma 2."""
        probability = (-cross_entropy(outputs, targets)).exp()  # of the true class
        weights = (1 - probability) ** 2
        return weights * self.cross_entropy(outputs, targets)


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return (N,), for each image the mean over the classes that it has, background too.

    Milletari et al. 2016, arXiv:1606.04797; in smp's DiceLoss absent classes count as 0.
    """
    truth = one_hot(outputs, targets)
    is_labelled = (targets != VOID).flatten(1)[:, None]
    shares = outputs.softmax(1).flatten(2) * is_labelled
    total = shares.sum(2) + truth.sum(2)
    overlap = (shares * truth).sum(2)
    coefficients = 2 * overlap / total.clamp(min=1e-7)
    return mean_over_present(1 - coefficients, truth)


def lovasz(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return (N,), the Lovász-Softmax loss of each image: Berman et al. 2018, arXiv:1705.08790."""
    if len(outputs) > 1:  # in turn, for want of memory
        each = map(lovasz, outputs.split(1), targets.split(1))
        return torch.cat(list(each))
    truth = one_hot(outputs, targets)
    shares = outputs.softmax(1).flatten(2)
    is_labelled = (targets != VOID).flatten(1)[:, None]
    # void comes last and adds nothing
    errors = (truth.float() - shares).abs()
    errors = errors * is_labelled
    order = errors.argsort(stable=True, dim=2, descending=True)
    is_true = truth.gather(2, order)
    size = truth.sum(2, keepdim=True)
    missed = size - is_true.cumsum(2)
    union = size + (~is_true).cumsum(2)
    # By how much each pixel raises the Jaccard loss, missed / union; exact, unlike
    # differences.
    before = union * (union - 1)
    of_false = missed / before.clamp(min=1)
    slopes = of_false.where(~is_true, 1 / union)
    slopes = torch.zeros_like(slopes).scatter(2, order, slopes)
    losses = (errors * slopes).sum(2)
    return mean_over_present(losses, truth)


def one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return bool (N, classes, H * W); void pixels are of no class."""
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    is_true = targets[:, None] == classes[:, None, None]
    return is_true.flatten(2)


def mean_over_present(losses: Tensor, truth: Tensor) -> Tensor:
    """Return (N,), the means of `losses` (N, classes) over the classes that an image has, or 0."""
    is_present = truth.any(2)
    count = is_present.sum(1).clamp(min=1)
    return (losses * is_present).sum(1) / count
