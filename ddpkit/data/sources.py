"""Where a run gets its batches: from loaders of ddpkit, or from any others."""

import itertools
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ddpkit.data import samples
from ddpkit.data.format import NAME
from ddpkit.data.loading import Loader, TrainSampler, batches_by_size
from ddpkit.data.normalizing import find_format, format_of, move, unpack
from ddpkit.data.other_loaders import OtherSource, check_share, drawn, numbered
from ddpkit.data.samples import Key
from ddpkit.errors import UserError
from ddpkit.ranks import replicas, stopping

# of networks that `eval_batches` was given, which weights
judged: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()


def find_source(
    loader: object, val_loader: object, accumulate: int, seed: int
) -> TrainSampler | OtherSource:
    """Return what Run has to know of its loader, in all of its epochs.

    Every rank has to call it.
    """
    for each in loader, val_loader:
        if not isinstance(each, Loader):
            continue
        if each.is_train != (each is loader):
            raise UserError(
                "Run(...) takes ddpkit.train_loader(...) and then ddpkit.val_loader(...): these "
                "are swapped"
            )
        if each.seeded.is_any:
            raise UserError(
                "Run(...) needs loaders of images: pass classes=classes to ddpkit.train_loader and "
                "val_loader"
            )
    check_formats(loader, val_loader)
    if not isinstance(loader, Loader):
        return OtherSource(loader, accumulate, seed)
    if loader.sampler.accumulate != accumulate:
        raise UserError(
            f"the training loader was made with accumulate={loader.sampler.accumulate}, Run(...) "
            f"with {accumulate}: use the same for both"
        )
    return loader.sampler


def eval_batches(loader: object, where: nn.Module | torch.device) -> Iterator[tuple]:
    """Yield this rank's batches for evaluation, (images, targets, ..., indices).

    where: the network that is evaluated, on whose device they are: meanwhile it is in evaluation
    mode, and afterwards in that of before, all its modules; or a device.

    images: float32 (N, C, H, W), uint8 ones normalised. targets: int64, or float32 if they are
    floating-point. indices: int64 (N,), of the samples in the dataset.

    loader: ddpkit.val_loader's; or any other DataLoader, whose dataset on several ranks has
        num_replicas and rank, as each rank has its own share. Its indices are negative, because the
        order of the dataset is not known. After a signal the loop ends early, and all ranks stop
        and save in `compute_metrics`.

    Raises a UserError for another loader on several ranks, and for a network and
    ddpkit.train_loader's, whose batches have no indices.

        for images, targets, *_, indices in ddpkit.eval_batches(val_loader, model):
    """
    if isinstance(where, nn.Module):
        if isinstance(loader, Loader) and loader.is_train:
            raise UserError(
                "eval_batches got ddpkit.train_loader(...), whose batches have no indices: to "
                "evaluate on training images pass it ddpkit.val_loader(train_set, ...)"
            )
        judged[where] = replicas.bit_sums(where.parameters())
        with replicas.in_evaluation(where):
            yield from eval_batches(loader, next(where.parameters()).device)
        return
    format = format_of(loader)
    for batch in _dealt(loader):
        yield move(batch, where, format)
        # `compute_metrics` and `end_epoch`, where all ranks pass, stop
        if stopping.stop_requested():
            break


def _dealt(loader: object) -> Iterator[list]:
    """Return the batches of a loader for evaluation that are this rank's, with indices."""
    if isinstance(loader, First):
        return iter(loader)
    if isinstance(loader, Loader):
        batches = batches_by_size(loader.raw())
        return numbered(batches) if loader.seeded.is_any else batches
    check_share(loader, "val")
    return numbered(drawn(loader, 0))


class First:
    """The first samples of a validation loader, a small batch, the same on all ranks."""

    def __init__(self, loader: object) -> None:
        self.loader = loader
        self.dataset = samples.dataset_of(loader)

    def __iter__(self) -> Iterator[list]:
        loader = self.loader
        if not isinstance(loader, Loader):
            return itertools.islice(numbered(drawn(loader, 0)), 1)
        count = min(2, len(self.dataset))
        keys = [Key(0, number, is_val=True) for number in range(count)]
        return batches_by_size([loader.collate_fn(loader.seeded.__getitems__(keys))])


def check_formats(train_loader: object, val_loader: object) -> None:
    """Raise a UserError unless images for training and validation are normalised alike."""
    train = format_of(train_loader)
    val = format_of(val_loader)
    if train.scale == val.scale:
        return
    for loader in (train_loader, val_loader):
        if find_format(samples.dataset_of(loader)):
            continue  # its uint8 images are normalised by the format
        # A set of one's own without a format: floats are taken as they are.
        if unpack(next(drawn(First(loader), 0)))[0].is_floating_point():
            return
    raise UserError(
        f"training images are normalised by {train.keys()}, validation images by "
        f"{val.keys()} of {NAME} ({{}}: ImageNet's mean and std): give both datasets the "
        "same `format`"
    )
