"""Where the batches of a training run come from: our sampler, or any other loader."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from engine.data import loading, samples, seeding
from engine.data.handover import Groups
from engine.data.samples import fingerprint
from engine.errors import UserError
from engine.ranks import distributed


class Own:
    """What Run has to know of a DataLoader with our TrainSampler, in all of its epochs."""

    is_exact = True  # continues in mid-epoch

    def __init__(self, loader: Any, accumulate: int) -> None:
        self.loader, self.sampler = loader, loader.sampler
        ranks = distributed.world_size()
        if self.sampler.global_batch != (loader.batch_size or 0) * ranks * accumulate:
            raise UserError(
                f"TrainSampler({self.sampler.batch_size}, ...) has a global batch of "
                f"{self.sampler.global_batch}, but the loader has batches of "
                f"{loader.batch_size} on {ranks} ranks, and {accumulate} pass(es) make a step"
            )
        self.total, self.global_batch = self.sampler.total, self.sampler.global_batch
        self.order, self.steps = self.sampler.order, self.sampler.steps

    def epoch(self, epoch: int, seen: int) -> Iterator[Any]:
        """Yield this rank's batches of `epoch`, without the first `seen` of its samples."""
        self.sampler.set_epoch(epoch, seen)
        for batch in loading.started(self.loader):
            if isinstance(batch, Groups):
                raise UserError("images of a training batch differ in size")
            yield batch

    def state(self) -> list[Any]:
        return []


class Foreign:
    """The same of any other loader of batches, which has a length.

    Seeded by the epoch, it yields the same batches on all ranks, which they take in turn; with a
    DistributedSampler each rank has its own. An epoch that was stopped starts over, unless the
    loader, or without workers its data set, has a state_dict.
    """

    def __init__(self, loader: Any, accumulate: int) -> None:
        self.loader, self.accumulate, self.ranks = loader, accumulate, distributed.world_size()
        self.is_dealt = not isinstance(getattr(loader, "sampler", None), DistributedSampler)
        try:
            batches = len(loader)
        except TypeError:
            raise UserError(
                "the training loader has no length: give its data set __len__, the number of "
                "samples of an epoch"
            ) from None
        self.steps = batches // (self.ranks if self.is_dealt else 1) // accumulate
        self.global_batch = (getattr(loader, "batch_size", 0) or 1) * self.ranks * accumulate
        self.total = self.steps * self.global_batch
        if not self.steps:
            raise UserError(
                f"the training loader has {batches} batch(es), fewer than an optimizer step takes "
                f"on {self.ranks} rank(s) with {accumulate} pass(es) each"
            )
        has_state = [
            part
            for part in (loader, *([] if getattr(loader, "num_workers", 0) else [loader.dataset]))
            if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        ]
        self.stateful = has_state[0] if has_state else None
        self.is_exact = self.stateful is not None
        self.saved: list[Any] = []  # the state to continue from
        self.order: dict[str, int | str] = {
            **{"images": self.total, "seed": 0, "training_set": fingerprint(samples.of(loader))},
            "sampler": type(loader).__name__,
        }
        how = "from its state_dict" if self.is_exact else "from its start, not to the bit"
        distributed.say(
            "the training loader has no engine.TrainSampler: an epoch that is stopped resumes "
            + how
        )

    def epoch(self, epoch: int, seen: int) -> Iterator[Any]:
        if not self.is_dealt:
            self.loader.sampler.set_epoch(epoch)
        getattr(samples.of(self.loader), "set_epoch", int)(epoch)
        seeding.seed(epoch)  # the same order on all ranks
        if seen and self.stateful and self.saved:
            self.stateful.load_state_dict(self.saved.pop())
        left = (self.total - seen) // self.global_batch * self.accumulate  # passes of a rank
        each = self.ranks if self.is_dealt else 1
        batches = iter(loading.started(self.loader))
        for _ in range(left):
            some = list(itertools.islice(batches, each))
            if len(some) < each:
                raise UserError(
                    f"the training loader ended early in epoch {epoch + 1}: its length "
                    f"is {len(self.loader)} batches"
                )
            yield some[distributed.rank() if self.is_dealt else 0]

    def state(self) -> list[Any]:
        """Return the state of each rank's stream after its last batch, for a checkpoint."""
        if self.stateful is None:
            return []
        return distributed.gather_objects(self.stateful.state_dict())
