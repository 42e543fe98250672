"""Where a run gets its batches: from loaders of ddpkit, or from any others."""

import copy
import itertools
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ddpkit.data.format import NAME
from ddpkit.data.loading import Loader, TrainSampler, batches_by_size
from ddpkit.data.normalizing import format_of, move
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
        judged[replicas.bare(where)] = replicas.bit_sums(where.parameters())
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
    if isinstance(loader, Loader):
        return batches_by_size(loader.raw())
    check_share(loader, "val")
    return numbered(drawn(loader, 0))


class First:
    """The first batch of any other loader, which is as that one in all else."""

    def __init__(self, loader: object) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator:
        return itertools.islice(drawn(self.loader, 0), 1)


def first(loader: object) -> object:
    """Return a loader of a first batch; of ours that is small, and the same on all ranks."""
    if not isinstance(loader, Loader):
        return First(loader)
    keys = [Key(0, n, is_val=True) for n in range(min(2, len(loader.seeded)))]
    own = copy.copy(loader)
    # past DataLoader's own rule that these do not change
    vars(own).update(batch_sampler=[keys], num_workers=0, timeout=0)
    return own


def check_formats(train_loader: object, val_loader: object) -> None:
    """Raise a UserError unless images for training and validation are normalised alike."""
    train = format_of(train_loader)
    val = format_of(val_loader)
    if train.scale == val.scale:
        return
    raise UserError(
        f"training images are normalised by {train.keys()}, validation images by "
        f"{val.keys()} of {NAME} ({{}}: ImageNet's mean and std): give both datasets the "
        "same `format`"
    )
