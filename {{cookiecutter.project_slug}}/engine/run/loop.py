"""class Run: what a training loop needs besides torch."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engine.data import loading, samples, seeding
from engine.data.sources import Foreign, Own
from engine.errors import UserError
from engine.ranks import devices, distributed, gradients, replicas
from engine.run import checkpoint, metrics, records, replay, sharded
from engine.run.folder import Folder
from engine.run.mistakes import Found, Mistakes
from engine.run.optimizers import fill_momenta
from engine.run.progress import Progress
from engine.run.reporting import Reporter

Judge = Callable[[nn.Module, Any], tuple[dict[str, float], Found]]


class Run(Progress):
    """A training run: its progress, which it saves and resumes to the step, and its reports.

    folder: whose `find_checkpoint` has been called; the run continues from what it found.
    train_loader: a DataLoader with our TrainSampler: the run continues in mid-epoch, to the bit. Or
        any other that has a length: it trains, but an epoch that was stopped starts over.
    val_loader: for the lines that it prints, and for drawing.
    model: the network that is evaluated, saved, exported and predicted with. trained: the one that
        is trained, if that is another, such as what `shard` or an average of weights returns.
    optimizer, scheduler, scaler, **more: saved by name with state_dict(), resumed with
        load_state_dict(). A LambdaLR follows the flags on resume, others resume as saved.
    best: the metric, higher is better, by which best.pt is chosen. accumulate: passes per optimizer
        step. save_every: optimizer steps between saves; 0: after each epoch only.
    flags: vars(args), kept in checkpoints and args.json.
    predict, draw: of dataset.py and model.py, for drawings: (model, images) -> outputs and
        draw_example(axes, image, target, logits, classes).
    tracker: gets the rows of metrics.csv, on rank 0: a function that takes the id of the run to
        continue, or None, and returns its id and a function of a row.

    Raises a UserError if the checkpoint does not fit.

    epoch: epochs finished; began: at the start of this process. step: optimizer steps taken.
    history: the rows of metrics.csv.

        run = engine.Run(folder, train_loader, val_loader, classes, model=model, ...)
        with run:
            while run.epoch < args.epochs:
                for i, (images, targets) in run.batches():
                    ...
    """

    def __init__(
        self,
        folder: Folder,
        train_loader: Any,
        val_loader: Any,
        classes: Sequence[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        epochs: int,
        best: str,
        trained: nn.Module | None = None,
        accumulate: int = 1,
        save_every: int = 0,
        flags: Mapping[str, object] | None = None,
        predict: Callable[[nn.Module, Tensor], Any] | None = None,
        draw: Callable[..., None] | None = None,
        tracker: records.Start | None = None,
        **more: Any,
    ) -> None:
        self.optimizer = optimizer
        self.model, self.trained = model, model if trained is None else trained
        self.train_loader, self.val_loader = train_loader, val_loader
        self.device = next(model.parameters()).device
        self.predict, self.draw_example = predict or (lambda model, images: model(images)), draw
        val_set = samples.of(val_loader)
        samples.check_alike(classes, training=samples.of(train_loader), validation=val_set)
        is_own = loading.is_ours(train_loader)
        source = (Own if is_own else Foreign)(train_loader, accumulate)
        # Whole weights are saved; those of an average besides what is averaged.
        is_shared = isinstance(self.trained, FSDPModule)
        parts: dict[str, Any] = {"model": self.trained if is_shared else model}
        parts |= {"optimizer": optimizer, "scheduler": scheduler, **more}
        if trained is not None and trained is not model and not is_shared:
            parts["trained"] = trained
        super().__init__(
            *(folder, source),
            best_of=f"{best} on {samples.fingerprint(val_set)}",
            classes=classes,
            epochs=epochs,
            accumulate=accumulate,
            save_every=save_every,
            score=best,
            flags=flags or {},
            format=dataclasses.asdict(loading.format_of(val_loader)),
            channels=getattr(val_loader.dataset, "channels", 3),
            parts=parts,
        )
        fill_momenta(optimizer)
        optimizer.register_step_pre_hook(gradients.check_step)
        self.is_complete = self._is_complete()
        self.resume(folder.state)
        self.began = self.epoch
        self.mean = gradients.Mean(self.device)
        self.is_divided = False  # the gradients of the last step
        self.report = Reporter(folder.path, self.device, epochs, self.epoch, self.is_complete)
        self.report.start(source, accumulate, classes, train_loader, val_loader, self.flags)
        self.report.catch_up(self.history, tracker)
        self.stopping = self.stoppable()

    def _is_complete(self) -> bool:
        state = self.folder.state
        if not state or state["epoch"] < self.epochs:
            return False
        return records.are_complete(self.folder.path, self.epochs)

    def __enter__(self) -> "Run":
        """A signal makes all ranks stop after the same step, save, and exit with status 75."""
        self.stopping.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.report.close()
        if not self.stopping.__exit__(kind, error, trace) and kind is None:
            if self.is_complete:
                remedy = "use --epochs N for more, --resume never to start over"
                return distributed.say(f"nothing left to do; {remedy}")
            self.report.finish(self.score, self.best)

    def batches(self) -> Iterator[tuple[int, tuple]]:
        """Yield (i, (images, targets, ...)) of the rest of the epoch, on the device.

        i: the number of the pass in the epoch, from 0; a resumed epoch continues where it stopped.
        images: float32 (N, C, H, W), uint8 ones normalised. targets: int64, or float32 if they are
        floating-point. Before each pass the random numbers are seeded by epoch, pass and rank.
        """
        ahead, format = devices.copies_ahead(self.device), loading.format_of(self.train_loader)
        left = (self.source.total - self.seen) // self.global_batch * self.passes_per_step
        found = self.source.epoch(self.epoch, self.seen)
        seed, rank = int(self.source.order["seed"]), distributed.rank()
        if self.model is not self.trained:
            self.model.train()  # for end_epoch to see whether `evaluate` was given it
        i = self.passes - 1
        for i, batch in enumerate(self.report.progress(found, left, self.epoch), start=self.passes):
            if i % self.passes_per_step == 0:
                self._check_last_step(i)
            parts = loading.move(batch, self.device, ahead, format)
            if not self.mean.size:
                self._start_mean(parts[1])
            seeding.seed(seed, self.epoch, i, rank)  # dropout differs by rank and pass
            if self.is_due(i):
                replay.stop_here()
            self.last_pass, self.is_divided = i, False
            self.report.forward.start()
            yield i, parts
        self._check_last_step(i + 1)

    def _start_mean(self, targets: Any) -> None:
        own = metrics.size(targets) if isinstance(targets, Tensor) else 1
        is_own = isinstance(self.source, Own)
        self.mean.start(own if is_own else distributed.from_rank_zero(lambda: own))

    def _check_last_step(self, i: int) -> None:
        """Raise a UserError if the passes before the `i`-th have not ended as a step does."""
        if i != self.passes:
            raise UserError(
                "run.end_step was not called after an optimizer step: call it after each, when "
                f"{self.passes_per_step} pass(es) are done"
            )

    def loss(self, loss_sum: Tensor, count: Tensor | int) -> Tensor:
        """Return the loss to call backward() on, once in each pass.

        loss_sum, count: scalars, what `criterion` returns. Ranks and passes hold unequal numbers of
        samples (labelled pixels), so a mean of their means would be wrong: this divides by a number
        that is equal everywhere, and `divide_gradients` then by the true count.

            loss_sum, count = criterion(outputs, targets)
            loss = run.loss(loss_sum, count)
            loss.backward()
        """
        self.report.forward.end()
        if isinstance(self.source, Foreign):
            count = self.totals.count.new_tensor(count) if isinstance(count, int) else count
        self.totals.add(loss_sum, count)
        self.report.loss(self.totals, self.optimizer.param_groups[-1]["lr"])
        is_last = (self.last_pass + 1) % self.passes_per_step == 0
        return self.mean.loss(loss_sum, count, is_last)

    def divide_gradients(self, ddp_model: nn.Module) -> None:
        """Divide the gradients, which DDP has averaged over the ranks, by the counts of all.

        After the last backward() of a step, before clipping and the optimizer's step: they become
        those of the mean loss over all samples of all ranks and passes.

        Raises a UserError if a pass had no `loss`, if no weight has a gradient, or if none of the
        passes went through `ddp_model`.
        """
        replicas.check_called(ddp_model)
        self.mean.finish(ddp_model, self.passes_per_step)
        self.is_divided = True

    def end_step(self) -> None:
        """Count an optimizer step; save if that is due; after a signal stop here, on all ranks.

        Raises a UserError if the gradients were not divided, or if the loss is not finite.
        """
        if not self.is_divided or self.mean.passes:
            raise UserError(
                "the gradients of a step were not divided by the counts of all ranks and passes: "
                "call run.divide_gradients(ddp_model) after its last backward()"
            )
        super().end_step()

    def mean_loss(self) -> float:
        """Return the mean loss of the epoch over all ranks; all have to call it, after the loop."""
        if self.mean.passes:
            self.end_step()  # raises
        loss = super().mean_loss()
        self.speed = self.report.speed()
        replicas.sync_networks(self.parts.values())
        if isinstance(self.trained, FSDPModule):
            sharded.gather(self.trained, self.model)
        return loss

    def end_epoch(self, row: Mapping[str, float | str]) -> bool:
        """Record a finished epoch and save; return whether its score is the best so far.

        row: numbers by name, for metrics.csv and TensorBoard.

        Raises a UserError if another network than `model` was evaluated.
        """
        if self.model.training:
            raise UserError(
                "evaluate() judged another network than Run(model=...), which is saved: that is in "
                "training mode; evaluate it, after model.eval()"
            )
        is_best = super().end_epoch({**row, **self.speed})
        self.save(is_best)
        self.report.end_epoch(self.history, is_best)
        return is_best

    def is_over(self, patience: int) -> bool:
        """Return whether all epochs are done, or the last `patience` brought no new best score.

        patience: 0 to do all epochs.
        """
        return self.epoch >= self.epochs or self._has_stalled(patience)

    def _has_stalled(self, patience: int) -> bool:
        scores = [float(row[self.score]) for row in self.history if self.score in row]
        # Greater ones are of another metric or validation set, by which earlier ones were judged.
        start = max((i + 1 for i, value in enumerate(scores) if value > self.best), default=0)
        first = next((i + 1 for i in range(start, len(scores)) if scores[i] == self.best), start)
        since = len(scores) - first
        if not 0 < patience <= since:
            return False
        distributed.say(f"--patience {patience}: no new best {self.score} for {since} epoch(s)")
        return True

    def rehearse(self, judge: Judge) -> None:
        """Try what follows an epoch on one validation batch, before the first one.

        judge: (model, loader) -> (results, what `draw` takes), as `evaluate` in main.py returns it.
        So a mistake in evaluation or drawing costs no epoch. If a kill came before the images of
        best.pt were drawn, they are drawn now.
        """
        if self.is_complete:
            return
        if self.epoch == 0 and self.seen == 0:
            results, found = judge(self.model, loading.First(self.val_loader))
            self.check_score(results)
            self.report.try_drawing(self._drawing(self.model, found))
        elif best := distributed.from_rank_zero(self.report.undrawn):
            network = copy.deepcopy(self.model)
            checkpoint.load_weights(network, best)
            self.draw(judge(network, self.val_loader)[1], network)

    def draw(self, found: Found, model: nn.Module | None = None) -> None:
        """Draw examples.png, worst.png, confusion.png and write per_class.csv, on rank 0.

        found: the confusion matrix of `compute`, and what Worst.compute() returns.
        """
        self.report.images(self._drawing(model or self.model, found))

    def _drawing(self, model: nn.Module, found: Found) -> Mistakes:
        how = self.classes, self.predict, self.draw_example
        return Mistakes.of(found, model, self.val_loader, *how)
