"""class Run: what a training loop needs besides torch. It counts, saves and resumes to the step."""

import contextlib
import dataclasses
import itertools
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpkit.data import loading, samples
from ddpkit.data.loading import OtherSource
from ddpkit.errors import NoLabelsError, UserError
from ddpkit.ranks import distributed, replicas, stopping
from ddpkit.run import agreement, checkpoint, metrics, pictures, reporting
from ddpkit.run.checkpoint import KEYS, OTHER_RUN, State
from ddpkit.run.criterion import Criterion
from ddpkit.run.first_steps import FirstSteps, LoopVariables
from ddpkit.run.folder import RunFolder
from ddpkit.run.mistakes import Mistakes, Worsts

# besides KEYS
OTHER_KEYS = (
    "trained",
    "sampler",
    "training_set",
    "colors",
    "best_by",
    "path",
    "trainable",
)
# of the loss; reading it at every step would stall the device
SECONDS_BETWEEN_CHECKS = 5
Evaluate = Callable[..., tuple[dict[str, float], Tensor | None, Worsts]]


class Run:
    """A training run: its progress, which it saves and resumes to the step, and its reports.

    folder: whose `find_checkpoint` has been called; the run continues from what it found.
    train_loader: with our TrainSampler the run continues in mid-epoch, to the bit; with another,
        which needs a length, the batches of before are read again, and left out.
    model: the network that is evaluated, saved, exported and predicted with. trained: the one that
        is trained, if that is another, of which `model` is an average.
    criterion: whose use in the first steps is checked.
    optimizer, scheduler, **more: saved by name with state_dict(), resumed with load_state_dict().
        A LambdaLR follows the flags on resume, others resume as saved.
    best: the metric by which best.pt is chosen; of several the first that `evaluate` returns. Lower
        is better of a loss, and of what torchmetrics says so; of numbers that are worked out by
        hand say it: ("cost", "min"). accumulate: passes per optimizer step. save_every: optimizer
        steps between saves; 0: after each epoch only. log_every: optimizer steps between lines of
        the log; 0: none.
    flags: vars(args), kept in checkpoints and args.json. predict, draw: for drawings, (model,
        images) -> outputs and draw_example(axes, image, target, logits, classes).
    tracker: gets the rows of metrics.csv, on rank 0: "mlflow", "trackio", "wandb", or a function
        that takes the id of the run to continue, or None, and returns its id and a function of a
        row.

    Raises a UserError if the checkpoint does not fit.

    epoch: epochs finished; began: at the start of this process. step: optimizer steps taken. seen:
    images trained on in this epoch, on all ranks. totals: this rank's sum of
    losses in it, and their count.

        run = ddpkit.Run(folder, train_loader, val_loader, classes, model=model, ...)
        with run:
            for epoch in range(run.epoch, args.epochs):
                for batches in run.steps(ddp_model):
                    ...
    """

    def __init__(
        self,
        folder: RunFolder,
        train_loader: Any,
        val_loader: Any,
        classes: Sequence[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        epochs: int,
        best: str | Sequence[str],
        trained: nn.Module | None = None,
        criterion: Criterion | None = None,
        accumulate: int = 1,
        save_every: int = 0,
        log_every: int = 0,
        flags: Mapping[str, object] | None = None,
        predict: Callable[[nn.Module, Tensor], Any] | None = None,
        draw: Callable[..., None] | None = None,
        tracker: str | reporting.Start | None = None,
        **more: Any,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"Run(optimizer=...) is a {type(optimizer).__name__}: give it one optimizer, and "
                "others by names of yours, such as optimizer2=optimizer2"
            )
        self.folder, self.classes, self.epochs = folder, classes, epochs
        self.scores = metrics.parse_best(best)
        then = folder.state or {}
        done = then.get("history") or [self.scores]
        there = [name for name in self.scores if name in done[-1]]
        self.score = (there or list(self.scores))[0]
        self.is_higher = self._direction_so_far(then)
        self.model, self.optimizer = model, optimizer
        self.trained = model if trained is None else trained
        self.device, self.val_loader = next(model.parameters()).device, val_loader
        self.predict, self.draw_example = (
            predict or (lambda model, images: model(images)),
            draw,
        )
        self.passes_per_step, self.save_every = accumulate, save_every
        val_set, kept = samples.of(val_loader), checkpoint.to_plain(dict(flags or {}))
        self.val_images = samples.fingerprint(val_set)
        agreement.check_alike(classes, training=train_loader, validation=val_loader)
        seed, epoch = kept.get("seed", 0), then.get("epoch", 0)
        self.source = loading.find_source(
            train_loader, val_loader, accumulate, seed, epoch
        )
        self.is_own = not isinstance(self.source, OtherSource)
        self.train_loader, self.global_batch = train_loader, self.source.global_batch
        self.parts = self._parts(scheduler, more)
        self.about = checkpoint.to_plain(  # the same in all checkpoints of this run
            {
                "kinds": checkpoint.kinds(self.parts),
                "classes": list(classes),
                "colors": pictures.colors_of(classes).tolist(),
                "resumed_from": folder.resume,
                "args": kept,
                "format": dataclasses.asdict(loading.format_of(val_loader)),
                "channels": getattr(
                    getattr(val_loader, "dataset", None), "channels", 3
                ),
            }
        )
        self.epoch, self.step, self.seen, self.saved_step = 0, 0, 0, -1
        self.networks: tuple[nn.Module, ...] = ()
        self._begin_totals()
        self.history: list[dict[str, float | str]] = []
        self.checked_at = time.monotonic()
        # after `end_epoch`: what its checkpoint has
        self.is_ended, self.at_end = False, ""
        self._resume(folder.state)
        self.began = self.epoch
        # of an epoch that is resumed
        self.at_start = self._summary() if self.seen else ""
        recorded = distributed.from_rank_zero(reporting.count, folder.path)
        self.is_complete = min(self.epoch, recorded) >= epochs
        self.first_steps = FirstSteps(self.parts, optimizer, criterion, accumulate)
        self.variables = LoopVariables()
        self.trainable_then = (folder.state or {}).get("trainable", 0)
        self.is_out = False  # of patience
        self.report = reporting.Reporter(
            folder.path,
            self.device,
            epochs,
            self.epoch,
            self.is_complete,
            log_every,
            self.step,
        )
        self.report.start(
            self.source, accumulate, classes, train_loader, val_loader, kept
        )
        self._note_best()
        if isinstance(tracker, str):
            tracker = reporting.find_tracker(tracker, folder.path, kept)
        self.report.catch_up(self.history, tracker)
        self.block = self._block()

    @staticmethod
    def steps_per_epoch(train_loader: Any, accumulate: int = 1) -> int:
        """Return how many optimizer steps an epoch has, for a scheduler; to call on all ranks.

        train_loader: any, also if the ranks take its batches in turn.

            steps = ddpkit.Run.steps_per_epoch(train_loader, args.accumulate)
        """
        return loading.steps_per_epoch(train_loader, accumulate)

    def _parts(self, scheduler: Any, more: State) -> State:
        """Return what is saved: with an average of the weights also those that are averaged."""
        if taken := more.keys() & {*KEYS, *OTHER_KEYS}:
            raise UserError(
                f"Run({min(taken)}=...): checkpoints have an entry of that name"
            )
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": scheduler,
            **more,
        }
        return (
            parts if self.trained is self.model else {**parts, "trained": self.trained}
        )

    def _resume(self, state: State | None) -> None:
        """Open the folder; continue from `state`, whose weights the model has already."""
        self.best_until: float = -1  # the last epoch whose best.pt counts
        if state:
            self._check_kind(state)
        self.folder.open_for_training(is_new=not state)
        if state:
            self._say_differences(state)
            self._take_position(state)
            step = self.epoch * self.source.steps + self.seen // self.global_batch
            then = state["images"], state["global_batch"], state["seen"]
            if then == (self.source.total, self.global_batch, self.seen):
                # epochs may have ended early
                step = state["scheduler"].get("last_epoch", step)
            checkpoint.load_states(state, self.parts, step)
            # After going back to an earlier checkpoint, a best.pt from later epochs
            # does not count.
            if self.folder.contains(state["path"]):
                is_back = state["path"] == self.folder.resume
                self.best_until = self.epoch if is_back else math.inf
            for name in self.parts:  # they take as much memory again
                state.pop(name, None)
        checkpoint.fill_momenta(self.parts)
        self.best, self.best_epoch = -math.inf, self.epoch
        # Killed before its first last.pt with a score, a run does not know yet which
        # one it has.
        if self.history or self.best_until < math.inf:
            self._find_best()

    def _find_best(self) -> None:
        """Take the score of best.pt, if that is the best of this metric on these images."""
        found = distributed.from_rank_zero(
            self.folder.best_score, self.best_of, self.best_until
        )
        worst = math.inf if self.is_higher is False else -math.inf
        self.best, self.best_epoch = found or (worst, self.epoch)

    @property
    def best_of(self) -> str:  # by which metric, on which images, best.pt is the best
        lowest = " (lowest)" if self.is_higher is False else ""
        return f"{self.score}{lowest} on {self.val_images}"

    def _direction_so_far(self, state: State) -> bool | None:
        """Return whether a higher score is better, as far as is known before it is worked out."""
        said = self.scores[self.score]
        found = state.get("best_by")  # by an earlier process
        if said is None and found in ([self.score, True], [self.score, False]):
            said = found[1]
        return metrics.higher_is_better(self.score) if said is None else said

    def _begin_totals(self) -> None:
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.loss_total, self.count_total = self.totals.unbind()
        self.logged = self.totals.clone()  # what the log has of them

    def _check_kind(self, state: State) -> None:
        """Raise a UserError if the checkpoint's weights are an average, or of other images."""
        is_average = "trained" in state
        if is_average != ("trained" in self.parts):
            how = (
                "with --ema, not without"
                if is_average
                else "without --ema, not with --ema"
            )
            raise UserError(f"{state['path']} was trained {how}: {OTHER_RUN}")
        checkpoint.check_format(state, loading.format_of(self.val_loader))

    def _take_position(self, state: State) -> None:
        self.epoch, self.step, self.history = (
            state["epoch"],
            state["step"],
            [*state["history"]],
        )
        if not state["seen"]:
            return
        if not self.is_own and state["global_batch"] != self.global_batch:
            line = "the training loader cannot continue with other ranks or batches"
            return distributed.print0(f"{line}: the epoch starts over")
        if any(state.get(name) != value for name, value in self.source.order.items()):
            line = "the images, --seed or the sampler have changed"
            return distributed.print0(f"{line}: the epoch starts over")
        self.seen, totals = state["seen"], self.totals.new_tensor(state["totals"])
        if len(totals) == distributed.world_size():
            self.totals += totals[distributed.rank()]
        elif distributed.is_rank_zero():
            self.totals += totals.sum(0)
        self.logged = self.totals.clone()

    def _say_differences(self, state: State) -> None:
        """Print the checkpoint's progress and what has changed since."""
        then, now = len(state["totals"]), distributed.world_size()
        line = f"{state['path']}: {state['epoch']} of {self.epochs} epochs done"
        if state["epoch"]:
            line += f", best {state['best']:.4f}"
        if steps := state["seen"] // state["global_batch"]:
            line += f" and {steps} step{'s' * (steps != 1)} of the next"
        if then != now:
            line += f"; {then} rank(s) then, {now} now: BatchNorm, dropout and rounding differ"
        changed = checkpoint.changes(state["args"], self.about["args"])
        distributed.print0(f"{line}; changed: {changed}" if changed else line)

    def __enter__(self) -> "Run":
        """A signal makes all ranks stop after the same step, save, and exit with status 75."""
        self.block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.block.__exit__(*error)

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        # lets rank 0 print the start lines before any rank can fail
        distributed.barrier()
        with stopping.on_signals(self.__str__):
            try:
                with contextlib.closing(self.report):
                    yield
                self._keep_changes()
                # rank 0 may still be saving: its watcher needs the others'
                distributed.barrier()
            except stopping.Stopped:
                if self.saved_step != self.step:
                    self.save()
                but = " without --resume never" if self.folder.resume == "never" else ""
                stopping.exit_stopped(
                    f"and saved at {self}; run the same command{but} to continue"
                )
        if self.is_complete:
            remedy = "use --epochs N for more, --resume never to start over"
            return distributed.print0(f"nothing left to do; {remedy}")
        if self.epoch < self.epochs and not self.is_out:
            distributed.print0(
                f"the loop was left after epoch {self.epoch} of {self.epochs}: the same command "
                "goes on from there; to stop early for good, use --patience"
            )
        return self.report.finish(self.score, self.best)

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.seen // self.global_batch}"

    def steps(self, *networks: nn.Module) -> Iterator[list[tuple]]:
        """Yield the batches of each optimizer step of the rest of the epoch, on the device.

        A step has `accumulate` batches, (images, targets, ...) each. images: float32 (N, C, H, W),
        uint8 ones normalised. targets: int64, or float32. Each step seeds all random numbers.

        networks: those that are trained, in DistributedDataParallel; the first in each step.
        """
        self._keep_changes()
        self.variables.begin_epoch(self, self.epoch, self.parts)
        self._say_frozen()
        if self.at_start and self.at_start != self._summary():
            distributed.print0(
                "a scheduler or another part was changed before run.steps() in an epoch that is "
                "resumed in its middle, where it has been changed already: do that at the end of "
                "the loop, after run.end_epoch"
            )
        self.at_start = ""
        self.networks = networks
        for network in networks:
            replicas.prepare_network(network)
        if self.model is not self.trained:
            self.model.train()  # for end_epoch to see whether `evaluate` was given it
        format = loading.format_of(self.train_loader)
        left = (self.source.total - self.seen) // self.global_batch
        found = self.source.batches(self.train_loader, self.epoch, self.seen)
        found = self.report.progress(found, left * self.passes_per_step, self.epoch)
        seed, rank = int(self.source.order["seed"]), distributed.rank()
        before = self.step
        while some := list(itertools.islice(found, self.passes_per_step)):
            if not self.first_steps.ended:
                loading.say_floats(some[0], self.val_loader)
            batches = [loading.move(batch, self.device, format) for batch in some]
            # dropout
            samples.seed(seed, self.epoch, self.seen // self.global_batch, rank)
            yield batches
            before += 1
            if self.step != before:
                raise UserError(
                    "run.end_step was not called once in a turn of the loop over run.steps, which "
                    "is one optimizer step; for more batches per step use --accumulate, such as "
                    "--accumulate 4"
                )

    def _say_frozen(self) -> None:
        """Say it, once, if fewer weights are trained than when the checkpoint was saved."""
        now = self._trainable()
        then = self.trainable_then
        self.trainable_then = 0
        if now < then:
            distributed.print0(
                f"warning: {then - now} weights are frozen that were trained when this run was "
                "stopped: what unfreezes them in an epoch has to do so, too, when the run resumes "
                "in a later one (epoch >= N, not ==)"
            )

    def _trainable(self) -> int:
        return sum(weight.requires_grad for weight in self.trained.parameters())

    @property
    def is_logged(self) -> bool:
        """Whether this step is one of every --log-every, for which `end_step` takes more."""
        return self.report.steps.is_due(self.step + 1)

    @property
    def writer(self) -> Any:
        """TensorBoard's SummaryWriter of the steps on rank 0; elsewhere it does nothing.

        run.writer.add_scalar("mine", value, run.step + 1)
        """
        return self.report.steps.writer

    def end_step(
        self, loss: Tensor | float, count: Tensor, grad_norm: Tensor | None = None
    ) -> None:
        """Count an optimizer step; save if that is due; after a signal stop here, on all ranks.

        loss: the sum of the losses of this rank's batches, whose mean over the ranks is that of the
        step. count: of the labels of all ranks. grad_norm: of the gradients, for the log.
        """
        for network in self.networks[:1]:  # others may be trained now and then
            replicas.check_called(network)
        self.first_steps.end_step(loss, count)
        if isinstance(loss, Tensor):
            loss = loss.detach()
        # as the loss is for the mean over the ranks
        share = 1 / distributed.world_size()
        self.loss_total.add_(loss * count, alpha=share)  # without reading the device
        self.count_total.add_(count, alpha=share)
        self.step += 1
        self.seen += self.global_batch
        if self.report.steps.is_due(self.step):
            self._log(grad_norm)
        if self.save_every and self.step % self.save_every == 0:
            self.save()
        elif (now := time.monotonic()) - self.checked_at > SECONDS_BETWEEN_CHECKS:
            self.checked_at = now
            self._check_loss(self.totals)
        stopping.end_step()

    def _log(self, grad_norm: Tensor | None) -> None:
        loss, count = distributed.reduce_tensor(self.totals - self.logged)
        at = f"epoch {self.epoch + 1}/{self.epochs}  "
        at += f"step {self.seen // self.global_batch}/{self.source.steps}"
        lr = self.optimizer.param_groups[-1]["lr"]
        self.report.steps.add(self.step, at, loss / count, lr, grad_norm)
        self.logged = self.totals.clone()

    def mean_loss(self) -> float:
        """Return the mean loss of the epoch over all ranks; all have to call it, after the loop."""
        is_early = self.source.total - self.seen >= self.global_batch
        if is_early and not distributed.all_arrive(
            f"left/{self.step}", distributed.timeout() / 10
        ):
            line = f"rank {distributed.rank()} left the training loop at {self} and other ranks"
            raise UserError(
                f"{line} did not: all have to take the same number of steps"
            )
        totals = distributed.reduce_tensor(self.totals)
        self._check_loss(totals)
        if is_early:  # a resumed run starts with the next epoch
            self.seen = self.source.total
        self.speed = self.report.speed()
        replicas.sync_networks(self.parts.values())
        loss, count = totals.tolist()
        return loss / count if count else 0.0  # class weights may make it small

    def end_epoch(self, row: Mapping[str, float | str]) -> bool:
        """Record a finished epoch, its numbers by name, and save; return whether it is the best.

        The numbers are rank 0's. What is stepped after it, such as a scheduler, is saved, too, when
        `is_over` or `batches` is called, or the `with` block ends.
        """
        stopping.agree()
        if self.model.training:
            line = "evaluate() judged another network than Run(model=...), which is saved: that is"
            line += " in training mode; evaluate it, after model.eval(); to save an average of it:"
            raise UserError(
                f"{line} Run(model=average.module, trained=model, average=average)"
            )
        self._take_score(row)
        row = distributed.from_rank_zero(checkpoint.to_plain, dict(row))
        self.epoch, self.seen = self.epoch + 1, 0
        self._begin_totals()
        self.history.append(
            {"epoch": self.epoch, "step": self.step, **row, **self.speed}
        )
        score = float(row[self.score])
        is_best = score > self.best if self.is_higher else score < self.best
        if self.best_epoch == self.epoch:  # it was killed after it had saved best.pt
            is_best = is_best or score == self.best
        if is_best:
            self.best, self.best_epoch = score, self.epoch
        self.save(is_best)
        self.is_ended, self.at_end = True, self._summary()
        self.report.end_epoch(self.history, is_best)
        return is_best

    def _summary(self) -> str:
        """Return on rank 0 what tells whether a part has changed."""
        return checkpoint.summary(self.parts) if distributed.is_rank_zero() else ""

    def _keep_changes(self) -> None:
        """Save again if a part was changed after `end_epoch`, such as a scheduler stepped there."""
        if not self.is_ended:
            return
        self.is_ended = False
        if distributed.from_rank_zero(lambda: self._summary() != self.at_end):
            self.save(is_best=self.best_epoch == self.epoch, again=True)

    def _take_score(self, row: Mapping) -> None:
        """Take from rank 0's row by which score best.pt is chosen."""
        before = self.best_of
        self.score, self.is_higher = distributed.from_rank_zero(self._check_score, row)
        if self.best_of != before or not self.history:
            self._find_best()
        self._note_best()

    def _check_score(self, row: Mapping) -> tuple[str, bool]:
        """Return the name of the score in a row, and whether a higher one is better."""
        found = [name for name in self.scores if name in row]
        if not found:
            given = " or ".join(self.scores)
            raise UserError(f"BEST of model.py is {given}: use one of {', '.join(row)}")
        name = found[0]
        is_higher = self.scores[name]
        if is_higher is None:
            is_higher = metrics.higher_is_better(name, row[name])
        if is_higher is None:
            raise UserError(
                f'BEST of model.py is "{name}", of which nothing says whether higher or lower is '
                f'better: write BEST = "{name}", "max" or BEST = "{name}", "min"'
            )
        return name, is_higher

    def _note_best(self) -> None:
        """Say in args.json which score is the best, for what searches for flags."""
        if self.is_higher is not None:
            self.report.note(best=[self.score, "max" if self.is_higher else "min"])

    def is_out_of_patience(self, patience: int) -> bool:
        """Return whether the last `patience` epochs had no new best; 0: never."""
        since = self.epoch - self.best_epoch
        self.is_out = 0 < patience <= since and self.epoch < self.epochs
        if self.is_out:
            distributed.print0(
                f"--patience {patience}: no new best {self.score} for {since} epoch(s)"
            )
        return self.is_out

    def save(self, is_best: bool = False, again: bool = False) -> None:
        """Write a checkpoint, unless the loss or a weight is not finite; to call on all ranks.

        again: the images of best.pt remain.
        """
        totals = distributed.gather(self.totals)
        self._check_loss(totals)
        self._check_weights()
        state = {
            **checkpoint.take_states(self.parts),
            **self.about,
            **self.source.order,
            "global_batch": self.global_batch,
            "epoch": self.epoch,
            "step": self.step,
            "seen": self.seen,
            "totals": totals.tolist(),
            "trainable": self._trainable(),
            "history": self.history,
            "best": self.best,
            "best_of": self.best_of,
            "best_by": [self.score, self.is_higher],
        }
        # The save after evaluation replaces the one before it, which has the same
        # weights.
        is_repeated = self.saved_step == self.step
        self.folder.add(state, is_best, replace=is_repeated, keeps_images=again)
        self.report.steps.flush()  # a run that resumes here has the entries before
        self.saved_step = self.step

    def _check_weights(self) -> None:
        """Raise a UserError unless all weights are finite; reads the device once."""
        names, weights = zip(*self.parts["model"].named_parameters(), strict=True)
        each = torch.stack(
            [weight.isfinite().all().to(self.device) for weight in weights]
        )
        finite = distributed.reduce_tensor(each.int(), "min").tolist()
        if not all(finite):
            raise self._not_finite(names[finite.index(0)], distributed.rank())

    def _check_loss(self, totals: Tensor) -> None:
        """Raise a UserError unless the sums of losses, (2,) or (ranks, 2), are finite."""
        if not (fine := totals.isfinite().all(-1)).all():
            rank = int(fine.int().argmin()) if fine.ndim else distributed.rank()
            raise self._not_finite(
                f"the loss of rank {rank}" if fine.any() else "the loss", rank
            )

    def _not_finite(self, what: str, rank: int) -> Exception:
        epoch, step, path = (
            self.epoch + 1,
            self.seen // self.global_batch or 1,
            self.folder.path,
        )
        again = f"--resume {shlex.quote(str(path / 'last.pt'))} --output-dir ANOTHER"
        return UserError(
            f"{what} became NaN or inf at epoch {epoch}, step {step}: try a lower --lr or more "
            f"--warmup-epochs, and check the input images; the checkpoints in {path} were saved "
            f"before that; to step through it: {again} --debug-rank {rank}, and a breakpoint in "
            "train_one_epoch with the condition: not loss.isfinite()"
        )

    def sanity_check(self, evaluate: Evaluate, *args: Any) -> None:
        """Try what follows an epoch on one validation batch, at the start of a run.

        evaluate: (model, loader, *args) -> results, confusion matrix, and what
            TopLosses.compute() returns.
        """
        if self.is_complete:
            return
        is_new = self.epoch == 0 and self.seen == 0
        if is_new or self.is_higher is None:
            with contextlib.suppress(NoLabelsError):  # in one batch
                results, confusion, worst = evaluate(
                    self.model, loading.First(self.val_loader), *args
                )
                self._take_score(results)
                if is_new:
                    self.report.try_drawing(self._drawing(confusion, worst))

    def draw(self, confusion: Tensor | None, worst: Worsts) -> None:
        """Draw examples.png, worst.png, confusion.png and write per_class.csv, on rank 0.

        confusion: of `compute`. worst: what TopLosses.compute() returns.
        """
        self.report.images(self._drawing(confusion, worst))

    def _drawing(self, confusion: Tensor | None, worst: Worsts) -> Mistakes:
        how = self.classes, self.predict, self.draw_example
        return Mistakes(confusion, worst, self.model, self.val_loader, *how)
