"""From the flags to settings of the machine, data sets and loaders."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dataset import build_dataset
from engine.data import balance, loading, overfit, samples
from engine.data.counts import Counts, count_classes
from engine.data.images import Format
from engine.data.loading import Loader, Options
from engine.data.samples import MapDataset
from engine.run import machine


@dataclass
class Data:
    settings: machine.Settings  # what machine.set_up chose: workers, threads, amp
    format: Format  # of the images
    train_set: MapDataset
    val_set: MapDataset
    classes: Sequence[str]
    counts: Counts | None  # of the training set's classes, for --sampler balanced


def build_data(args: Namespace, device: torch.device) -> Data:
    """Set up the machine and read what --data has; --class-weights in `args` become numbers."""
    batch_size = args.batch_size or loading.BATCH_SIZE  # at most
    settings = machine.set_up(
        *(device, args.workers, args.threads, args.pin_memory, args.amp),
        bytes_per_worker=4 * (args.channels or 1) * args.prefetch * batch_size * args.image_size**2,
    )
    format = Format(args.value_range, args.max_megapixels, args.channels, args.mean, args.std)
    train_set: MapDataset
    val_set: MapDataset
    train_set, val_set, classes = build_dataset(
        args.data, args.image_size, format, args.augment, args.output_dir
    )
    samples.check_alike(args.data, train_set, val_set, classes)
    if args.overfit:
        args.batch_size = overfit.batch_size(args.batch_size, args.overfit, args.accumulate)
        batch = args.batch_size * args.accumulate
        train_set, val_set = overfit.choose(train_set, args.overfit, args.seed, batch)
    is_balanced, counts = args.sampler == "balanced", None
    if is_balanced or args.class_weights == "auto":
        counts = count_classes(train_set, classes, args.output_dir)
    args.class_weights = balance.class_weights(args.class_weights, counts, classes)
    return Data(settings, format, train_set, val_set, classes, counts if is_balanced else None)


def build_train_loader(data: Data, args: Namespace) -> Loader:
    """Return the loader for training; without --batch-size, `args` get one that fits the set."""
    args.batch_size = args.batch_size or loading.batch_size_for(
        len(data.train_set), args.accumulate
    )
    return loading.build_train_loader(
        *(data.train_set, len(data.classes), args.batch_size, args.accumulate),
        options(data, args),
        counts=data.counts,
    )


def build_val_loader(data: Data, args: Namespace) -> Loader:
    classes = len(data.classes)
    return loading.build_val_loader(data.val_set, classes, args.batch_size, options(data, args))


def options(data: Data, args: Namespace) -> Options:
    settings = data.settings
    return Options(settings.workers, args.prefetch, settings.pin_memory, args.seed)
