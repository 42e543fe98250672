"""class Run: Checkpoints of a training by steps and epochs, with checks of its numbers."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ddpkit.data import normalizing, samples, sources
from ddpkit.data.format import Format
from ddpkit.data.loading import Loader
from ddpkit.data.other_loaders import OtherSource
from ddpkit.errors import NoLabelsError, UserError
from ddpkit.ranks import distributed, replicas, stopping
from ddpkit.run import agreement, checkpoint, finite, states
from ddpkit.run.best import Best
from ddpkit.run.checkpoint import OTHER_RUN
from ddpkit.run.criterion import Criterion
from ddpkit.run.first_steps import FirstSteps
from ddpkit.run.folder import RunFolder
from ddpkit.run.progress import (
    Rows,
    Sums,
    added_up,
    means_of,
    progress_line,
    say_batches,
)
from ddpkit.run.resuming import IN_LOOP, Checkpoints, Phase, Steps, is_later
from ddpkit.run.states import State

# of the loss; reading it at every step would stall the device
SECONDS_BETWEEN_CHECKS = 5
Row = Mapping[str, float | str]  # of metrics.csv
Worsts = Sequence[tuple[float, int]]  # (loss, index) of images
Evaluate = Callable[..., tuple[dict[str, float], Tensor | None, Worsts]]


class LossState:
    """What training changes of a loss's buffers, a part; what it does not follows the flags."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss
        self.first = copy.deepcopy(loss.state_dict())

    def state_dict(self) -> State:
        found = {}
        for name, each in self.loss.state_dict().items():
            same = torch.equal if isinstance(each, Tensor) else operator.eq
            if name not in self.first or not same(each, self.first[name]):
                found[name] = each
        return found

    def load_state_dict(self, saved: State) -> None:
        self.loss.load_state_dict({**self.loss.state_dict(), **saved})


class Passes:
    """The batches of an optimizer step: each is on the device when its turn comes.

    Their number, len(batches), is that of one rank, also if there are several virtual ones here.

    batches: of the loader, whose images have this format. take: begins each pass.
    """

    def __init__(
        self,
        batches: list,
        device: torch.device,
        format: Format,
        of_each: int,
        take: Callable[..., Iterator],
    ) -> None:
        self.batches = batches
        self.of_each = of_each
        self.take = take
        self.move = functools.partial(normalizing.move, device=device, format=format)
        self.device = device
        self.moved = [self.move(batches[0])] if len(batches) == 1 else None

    def __len__(self) -> int:
        return self.of_each

    def __iter__(self) -> Iterator[tuple]:
        moved = self.moved or map(self.move, self.batches)
        return self.take(moved, len(self.batches))

    @property
    def targets(self) -> Iterator[Any]:
        """Those of each pass, on the device: int64, or float32."""
        if self.moved:
            return iter([self.moved[0][1]])
        batches = map(normalizing.unpack, self.batches)
        return (normalizing.move_targets(each[1], self.device) for each in batches)


class Run(Checkpoints):
    """A training run: its progress, which it saves and resumes to the step, and its reports.

    folder: whose `find_checkpoint` has been called; the run continues from what it found.
    train_loader: `ddpkit.train_loader`'s continues in mid-epoch at once; of another, which needs a
        length and, on several ranks, a DistributedSampler or a dataset that says by num_replicas
        and rank that it has this rank's samples, the batches of before are read again.
    model: the network that is evaluated, saved, exported and predicted with. trained: the one that
        is trained, if that is another, of which `model` is an average.
    criterion: whose use in the first steps is checked; what training changes of its buffers is
        saved.
    optimizer, scheduler, **more: saved by name with state_dict(), resumed with load_state_dict().
        A LambdaLR follows the flags on resume, others resume as saved.
    report: a ddpkit.Reporter, of whose number of epochs the run is; or what has its methods.
    best: the metric by which best.pt is chosen; of several the first that `evaluate` returns. Lower
        is better for a name that ends in loss, and where torchmetrics says so; for your own numbers
        give the direction: ("cost", "min"). accumulate: passes per optimizer step. save_every:
        optimizer steps between saves; 0: after each epoch only.
    flags: vars(args), kept in checkpoints and args.json.

    Raises a UserError if the checkpoint does not fit.

    epoch: epochs finished. step: optimizer steps taken. seen: images trained on in this epoch, on
    all ranks. history: the rows of metrics.csv. best, best_epoch: the best score so far, and when.

        report = ddpkit.Reporter(args.output_dir, args.epochs)
        run = ddpkit.Run(folder, train_loader, val_loader, classes, report=report, ...)
        with run:
            for epoch in range(run.epoch, args.epochs):
                for step, batches in run.steps(train_loader, ddp_model):
                    ...
    """

    name = "run"
    goes_on_after_last = False  # it keeps what an epoch's steps have added up
    settled = frozenset({Phase.OUTSIDE, Phase.EPOCH, Phase.AFTER})

    def __init__(
        self,
        folder: RunFolder,
        train_loader: Any,
        val_loader: Any,
        classes: Sequence[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        report: Any,
        best: str | Sequence[str],
        trained: nn.Module | None = None,
        criterion: Criterion | None = None,
        accumulate: int = 1,
        save_every: int = 0,
        flags: Mapping[str, object] | None = None,
        **more: Any,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"Run(optimizer=...) got a {type(optimizer).__name__}: pass one optimizer, and any "
                "others under your own names, such as optimizer2=optimizer2"
            )
        agreement.check_alike(classes, training=train_loader, validation=val_loader)
        self.flags = checkpoint.to_plain(dict(flags or {}))
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.classes = classes
        self.model = replicas.bare(model)
        self.trained = replicas.bare(trained or model)
        self.criterion = criterion
        self.optimizer = optimizer
        self.report = report
        self.last_epoch: int = report.epochs
        self.accumulate = accumulate
        self.device = next(model.parameters()).device
        self.source = sources.find_source(
            train_loader,
            val_loader,
            accumulate,
            seed=self.flags.get("seed", 0),
        )
        self.first_place = self._place()
        self.place = self.first_place  # that of the images that are `seen`
        self.last_lr_step: int | None = None  # of the scheduler in a checkpoint
        self.settings = states.settings(optimizer)  # before those of a checkpoint
        self.seen = 0
        self.sums = Sums(self.source.ranks, report.log_every > 0)
        val_images = samples.fingerprint(samples.dataset_of(val_loader))
        self.history: list[Row] = list((folder.state or {}).get("history", ()))
        super().__init__(
            folder,
            save_every=save_every,
            seed=int(self.source.order["seed"]),
            **self._parts(scheduler, criterion, more),
        )
        self.ranks = self.source.ranks
        self.chosen = Best(best, val_images, folder)
        # In a step each rank draws numbers of its own, as for dropout.
        self.draws_by_rank = True
        self.share_outside = 0
        # that take each step: in DistributedDataParallel, and without
        self.stepped: list[tuple[nn.Module, nn.Module]] = []
        self.checked_at = time.monotonic()
        self.speed: dict[str, float] = {}
        self.is_out = False  # of patience
        watched = criterion if isinstance(criterion, Criterion) else None
        self.first_steps = FirstSteps(
            self.parts, optimizer, watched, accumulate, self.ranks, self.turns.stepped
        )
        # as far as the checkpoint, and metrics.csv, which is written after it
        self.is_complete: bool = report.begin_run(self)
        self.block = self._block()

    @staticmethod
    def steps_per_epoch(train_loader: Any, accumulate: int = 1) -> int:
        """Return how many optimizer steps an epoch has, for a scheduler; to call on all ranks.

        train_loader: any.

            steps = ddpkit.Run.steps_per_epoch(train_loader, args.accumulate)
        """
        if isinstance(train_loader, Loader):
            return train_loader.sampler.steps
        return OtherSource(train_loader, accumulate).steps

    @property
    def best(self) -> float:
        """The best score so far; infinite before the first."""
        return self.chosen.score

    @property
    def best_epoch(self) -> int:
        return self.chosen.epoch

    @property
    def batch_size(self) -> int:
        """Images of a pass on one rank."""
        passes = self.source.passes * distributed.world_size()  # of a step
        return self.source.global_batch // passes

    @property
    def is_logged(self) -> bool:
        """Whether this step is one of every --log-every, for which `end_step` takes more."""
        return self.report.is_due(self.step + 1)

    @property
    def writer(self) -> Any:
        """TensorBoard's SummaryWriter of the steps on rank 0; elsewhere it does nothing.

        run.writer.add_scalar("mine", value, run.step + 1)
        """
        return self.report.writer

    # How a run begins, and goes on from a checkpoint.

    def _parts(self, scheduler: object, criterion: object, more: State) -> State:
        """Return what is saved: with an average of the weights also those that are averaged."""
        taken = more.keys() & checkpoint.EXAMPLES.keys()
        if taken:
            raise UserError(
                f"Run({min(taken)}=...): this name is reserved in checkpoints; use another"
            )
        parts: State = {"model": self.model, "optimizer": self.optimizer}
        if scheduler is not None:
            parts["scheduler"] = scheduler
        parts |= more
        if isinstance(criterion, nn.Module) and criterion.state_dict():
            parts["criterion"] = LossState(criterion)
        if self.trained is not self.model:
            parts["trained"] = self.trained
        return parts

    def _modules(self) -> list[nn.Module]:
        loss = getattr(self.criterion, "loss", None)
        others = [loss] if isinstance(loss, nn.Module) else []
        # an average of the weights has no pass in a step
        return others + [each for each in super()._modules() if each is not self.model]

    def _about(self) -> State:
        """Return what is the same in all checkpoints of this run."""
        about = {
            "classes": list(self.classes),
            "colors": self.report.colors(),
            "args": self.flags,
            "format": dataclasses.asdict(normalizing.format_of(self.val_loader)),
            "channels": getattr(self.val_loader, "channels", 3),
            "settings": self.settings,
        }
        return checkpoint.to_plain(about)

    def _load(self, state: State) -> None:
        self._check_kind(state)
        self._say_differences(state)
        self.epoch = state["epoch"]
        self.step = self.first_step = state["step"]
        self.seen = state["seen"]
        self.done = self.seen // self.source.global_batch
        if self.seen:
            self.sums.resume(state)
        self.place = {name: state.get(name) for name in self.first_place}
        self.last_lr_step = state["scheduler"].get("last_epoch")
        if not self.seen:  # else `steps` does, with the loader of the epoch
            self._compare_places(self.first_place)
        state.setdefault("criterion", {})  # which it may have had no need of
        saved = {}
        for name, each in state.items():
            if name in self.parts or is_later(name):
                saved[name] = each
        state |= self._own_states(state, saved)
        remedy = checkpoint.to_undo(state, self.classes, self.flags)
        step = self._schedule_step()
        states.load_states(state, self.parts, state, remedy, step)

    def _place(self) -> State:
        """Return what decides which images follow, besides the epoch and `seen`: rank 0's."""
        here = {**self.source.order, "global_batch": self.source.global_batch}
        return distributed.from_rank_zero(lambda: here)

    def _take_loader(self, loader: object) -> None:
        """Read this one from here on; a run that resumes with others starts its epoch over."""
        if loader is not self.train_loader:
            agreement.check_alike(self.classes, training=loader)
            steps = self.source.steps
            self.source = sources.find_source(
                loader, self.val_loader, self.accumulate, self.seed
            )
            self.train_loader = loader
            if steps != self.source.steps:
                distributed.print0(
                    f"this loader has {self.source.steps} steps per epoch, the one before "
                    f"{steps}: a learning-rate schedule over all steps ends earlier or later"
                )
        place = self._place()
        if self.seen and self.step == self.first_step:  # it goes on in this epoch
            self._compare_places(place)
            scheduler = self.parts.get("scheduler")
            step = self._schedule_step()
            if type(scheduler) is LambdaLR and scheduler.last_epoch != step:
                states.follow(scheduler, step, {})
                self.saved_sums = self._checksums(self.saved_sums)
        self.place = place

    def _compare_places(self, now: State) -> None:
        """Report how the batches differ from those of a checkpoint; go to the epoch's start."""
        then = self.place
        say_batches(
            then["global_batch"],
            now["global_batch"],
            "--batch-size x ranks x --accumulate",
            "--lr",
        )
        has_other_steps = then["global_batch"] != now["global_batch"]
        reason = ""
        if isinstance(self.source, OtherSource) and has_other_steps:
            reason = "the training loader cannot resume with another number of ranks or batch size"
        elif {**then, "global_batch": now["global_batch"]} != now:
            reason = "the images, --seed or the sampler have changed"
        if self.seen and reason:
            distributed.print0(f"{reason}: the epoch starts over")
            self.seen = 0
            self.sums.clear()
            self.last_lr_step = None
        elif then["training_set"] not in (None, now["training_set"]):
            distributed.print0("the training images have changed since the stop")
        if has_other_steps or then["images"] != now["images"]:
            self.last_lr_step = None
        self.done = self.seen // self.source.global_batch

    def _schedule_step(self) -> int:
        """Return at which optimizer step a schedule goes on that follows the flags of now."""
        if self.last_lr_step is None:
            return self.epoch * self.source.steps + self.done
        return self.last_lr_step  # what was, also if epochs have ended early

    def _check_kind(self, state: State) -> None:
        """Raise a UserError if the checkpoint's weights are an average, or of other images."""
        is_average = "trained" in state
        if is_average != ("trained" in self.parts):
            how = "without --ema, not with --ema"
            if is_average:
                how = "with --ema, not without"
            raise UserError(f"{state['path']} was trained {how}: {OTHER_RUN}")
        checkpoint.check_format(state, normalizing.format_of(self.val_loader))

    def _say_differences(self, state: State) -> None:
        """Print the checkpoint's progress and what has changed since."""
        steps = state["seen"] // state["global_batch"]
        line = progress_line(state, steps, f"of {self.last_epoch} epochs")
        ranks = state.get("ranks") or len(state["totals"])  # of version 2
        now = distributed.world_size()
        virtual = self.source.virtual_ranks
        before = state.get("virtual_ranks", 0)
        if before != virtual:
            line += (
                f"; --virtual-ranks was {before}, now {virtual}: results will differ"
            )
        elif ranks != now and not virtual:
            line += f"; saved on {ranks} rank(s), now {now}: BatchNorm, dropout and rounding differ"
        distributed.print0(line + self._place_line(steps, self.source.steps))
        changed = checkpoint.changes(state["args"], self.flags)
        if changed:
            distributed.print0(f"changed since then: {changed}")

    def sanity_check(self, evaluate: Evaluate, *args: object) -> None:
        """Try what follows an epoch on one validation batch, at the start of a run.

        evaluate: (model, loader, *args) -> results, confusion matrix, and what
            TopLosses.compute() returns.
        """
        is_new = not self.step
        is_known = self.chosen.is_higher is not None
        if self.is_complete or (is_known and not is_new):
            return
        with contextlib.suppress(NoLabelsError):  # in one batch
            first = sources.first(self.val_loader)
            results, *_ = evaluate(self.model, first, *args)
            self._choose_score(results)
            # it would read one more image, before a breakpoint in workers is reached
            if is_new and not distributed.any_debugged():
                self.report.try_drawing(self.model, self.val_loader)

    # The block: after a signal all ranks stop after the same step, save, and exit with 75.

    def __enter__(self) -> "Run":
        self.block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.block.__exit__(*error)

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        # lets rank 0 print the start lines before any rank can fail
        distributed.barrier()
        with stopping.on_signals(self._here), self._in_epochs():
            try:
                with contextlib.closing(self.report):
                    yield
                self._keep_changes(is_over=True)
                # rank 0 may still be saving: its watcher needs the others'
                distributed.wait_for_all()
            except stopping.Stopped:  # in an evaluation
                self._leave()
        self._say_end()

    def _leave(self) -> NoReturn:
        self.report.close()
        super()._leave()

    def _say_end(self) -> None:
        if self.is_complete:
            distributed.print0(
                "nothing left to do; for more epochs use another --output-dir; --resume never "
                "starts over"
            )
        elif self.epoch < self.last_epoch and not self.is_out:
            distributed.print0(
                f"the loop ended after epoch {self.epoch} of {self.last_epoch}: the run is "
                "unfinished, and the same command resumes it; to stop early for good use "
                f"--patience or --epochs {self.epoch}"
            )
        else:
            example = samples.file_of(samples.dataset_of(self.val_loader), 0)
            self.report.print_results(
                self.chosen.name,
                self.best,
                self.best_epoch,
                example or "IMAGE_OR_FOLDER",
            )

    def epochs(self, count: int) -> Iterator[int]:
        """Return those that are left of `count`; `end_epoch` ends each."""
        return iter(range(self.epoch, count))

    # The steps of an epoch.

    def steps(self, loader: object, /, *networks: nn.Module) -> Steps:
        """Return a loop over the optimizer steps that are left of the epoch: (step, batches).

        loader: that of Run, or another one for this epoch, as of larger images.

        step: of this epoch, from 0. batches: the `accumulate` of a step, (images, targets, ...)
        each, on the device when its turn comes; images: float32 (N, C, H, W), uint8 ones
        normalised; targets: int64, or float32. batches.targets: the targets of each. Each step
        seeds all random numbers.

        networks: those that are trained, in DistributedDataParallel; the first in each step.
        """
        # of tqdm, in place of whose bar there is one
        self._take_loader(getattr(loader, "iterable", loader))
        return Steps(self.source.steps, lambda: self._begin_steps(networks))

    def _begin_steps(self, networks: tuple[nn.Module, ...]) -> Iterator:
        if self.phase is Phase.OUTSIDE:
            raise UserError("write `with run:` around the loop, which a signal stops")
        if self.epoch >= self.last_epoch:
            raise UserError(
                f"all {self.last_epoch} epochs are done: write the loop as for epoch in "
                "range(run.epoch, args.epochs)"
            )
        self.report.print_parameters(self.trained)
        # others may be trained now and then
        self.stepped = [
            (replicas.in_ddp(each), replicas.bare(each)) for each in networks[:1]
        ]
        sources.judged.pop(self.model, None)
        if self.model is not self.trained:
            self.model.train()  # for end_epoch to see whether it was evaluated
        steps = self.source.steps
        return self._turns(self._read_steps, networks, steps, self.source.virtual_ranks)

    def _read_steps(self) -> Iterator[tuple[int, Passes]]:
        source = self.source
        passes = source.passes
        loader = self.train_loader
        if isinstance(source, OtherSource):
            batches = source.read_epoch(self.reading, loader, self.epoch, self.seen)
        else:
            batches = loader.raw(self.epoch, self.seen)
        found = self.report.progress(
            batches,
            self.epoch,
            passes=self.steps_left * passes,
            batch_size=self.batch_size,
        )
        format = normalizing.format_of(loader)
        some = list(itertools.islice(found, passes))
        while some:
            how = self.accumulate, self._take_passes
            yield self.done, Passes(some, self.device, format, *how)
            some = list(itertools.islice(found, passes))
        replicas.sync_networks(self.parts.values())

    @property
    def steps_left(self) -> int:
        """Those of this epoch."""
        return (self.source.total - self.seen) // self.source.global_batch

    def end_step(
        self,
        loss: Tensor | float | Sequence[Tensor],
        count: Tensor | float,
        grad_norm: Tensor | None = None,
        **sums: object,
    ) -> None:
        """Count an optimizer step, whose turn ends the loop's body: a save, or a stop, comes then.

        loss: the losses of this rank's batches, or their sum, whose mean over the ranks is that of
        the step. count: of the labels of all ranks. grad_norm: of the gradients, for the log. sums:
        of this rank, by name: numbers to add up, or (sum, count) of a mean; `means` has them of all
        steps and ranks.
        """
        if self.phase not in IN_LOOP:
            raise UserError(
                "run.end_step outside the loop over run.steps: a loop over the loader itself "
                "cannot resume; write for step, batches in run.steps(train_loader, ddp_model)"
            )
        for ddp_model, network in self.stepped:
            replicas.check_called(ddp_model)
            if not network.training:
                raise UserError(
                    "training step in eval mode: BatchNorm and dropout do not train; evaluate with "
                    "ddpkit.eval_batches(loader, model), which restores the mode, or call "
                    "recipe.set_training(ddp_model) afterwards"
                )
        losses = loss if isinstance(loss, Sequence) else [loss]
        self.first_steps.judge_step(losses, count)
        self.sums.add_step(losses, count, sums)
        self.step += 1
        self.done += 1
        self.seen += self.source.global_batch
        if self.report.is_due(self.step):
            at = f"{self.done}/{self.source.steps}"
            lr = self.optimizer.param_groups[-1]["lr"]
            loss_since = self.sums.loss_since_log()
            self.report.log_step(self.step, loss_since, lr, grad_norm, at)
        if time.monotonic() - self.checked_at > SECONDS_BETWEEN_CHECKS:
            self.checked_at = time.monotonic()
            finite.check_losses([self.sums.collect()], self._here())

    def _count(self, before: int) -> None:
        if self.step != before + 1:
            raise UserError(
                "call run.end_step exactly once per iteration of run.steps, which is one optimizer "
                "step, even if you skip that; for more batches per step use --accumulate, such as "
                "--accumulate 4"
            )

    def means(self) -> dict[str, float]:
        """Return train_loss, the mean over all ranks, and the `sums` of `end_step`, by name.

        All ranks have to call it, after the loop, at whose end they get the BatchNorm statistics of
        rank 0.
        """
        is_early = self.steps_left > 0
        if is_early:
            name = f"left/{self.step}"
            if not distributed.all_arrive(name, distributed.timeout() / 10):
                rank = distributed.rank()
                raise UserError(
                    f"rank {rank} left the training loop at {self._position()} but other ranks did "
                    "not: all ranks must take the same number of steps"
                )
        sums = self._sums_of_all()
        if is_early:  # a run that resumes starts with the next epoch
            self.seen = self.source.total
            self.done = self.source.steps
            replicas.sync_networks(self.parts.values())
        self.speed = self.report.speed()
        return means_of(sums)

    def _sums_of_all(self) -> Rows:
        ranks = distributed.gather_objects(self.sums.collect())
        finite.check_losses(ranks, self._here())
        return added_up(ranks)

    # The end of an epoch.

    def end_epoch(
        self, row: Mapping[str, float | str], is_evaluated: bool = True
    ) -> bool:
        """Record a finished epoch, its numbers by name, and save; return whether it is the best.

        The numbers are rank 0's; a warning names those that differ between ranks. What is stepped
        after it, such as a scheduler, is saved, too, when `steps` is called, or the `with` block
        ends.

        is_evaluated: False for an epoch without a score, of those between two evaluations.
        """
        if self.phase is Phase.EPOCH:
            raise UserError(
                "run.end_epoch in an epoch without a loop over run.steps(train_loader, ddp_model)"
            )
        # Before any collective: another rank may be in one of evaluate().
        if is_evaluated:
            now = replicas.bit_sums(self.model.parameters())
            by_hand = None if self.model.training else now
            if sources.judged.get(self.model, by_hand) != now:
                raise UserError(
                    f"rank {distributed.rank()} did not evaluate the model of Run(model=...) with "
                    "the weights that are saved: evaluate it on all ranks, with "
                    "ddpkit.eval_batches(loader, model) or after model.eval(), or pass "
                    "is_evaluated=False to end_epoch; to save an average of it: "
                    "Run(model=average.module, trained=model, average=average)"
                )
        stopping.agree()
        if is_evaluated:
            self._choose_score(row)
        row = self._agreed(checkpoint.to_plain(dict(row)))
        self.epoch += 1
        self.done = self.seen = 0
        self.place = self.first_place
        self.sums.clear()
        self._begin_epoch()
        position = {"epoch": self.epoch, "step": self.step}
        self.history.append({**position, **row, **position, **self.speed})
        is_best = is_evaluated and self.chosen.take(
            float(row[self.chosen.name]), self.epoch
        )
        self._write(is_best)
        self.saved_sums = self._checksums(self.parts)
        self.report.log_last_row(is_best)  # that of `history`
        return is_best

    def _agreed(self, row: Row) -> Row:
        """Return rank 0's row; warn of numbers that differ on other ranks."""
        rows = distributed.gather_objects(row)
        for name, value in rows[0].items():
            found = [str(each.get(name)) for each in rows]
            if len(set(found)) > 1:
                distributed.print0(
                    f"warning: {name} differs between ranks ({', '.join(found)}): reduce it over "
                    "the ranks, as evaluate() in main.py does, or pass it to run.end_step as "
                    f"name=(sum, count); metrics.csv gets {value}"
                )
        return rows[0]

    def is_out_of_patience(self, patience: int) -> bool:
        """Return whether the last `patience` epochs had no new best; 0: never."""
        since = self.epoch - self.best_epoch
        self.is_out = 0 < patience <= since and self.epoch < self.last_epoch
        if self.is_out:
            name = self.chosen.name
            distributed.print0(
                f"--patience {patience}: no new best {name} for {since} epoch(s)"
            )
        return self.is_out

    def draw(self, confusion: Tensor | None, worst: Worsts) -> None:
        """Draw examples.png, worst.png, confusion.png and write per_class.csv, on rank 0.

        confusion: of `compute_metrics`. worst: what TopLosses.compute() returns.
        """
        self.report.write_images(confusion, worst, self.model, self.val_loader)

    def _choose_score(self, row: Mapping) -> None:
        self.chosen.choose(row, self.epoch)
        self.report.note_facts(best=self.best_by)  # for what searches for flags

    @property
    def best_by(self) -> Sequence[str]:
        """The score that is the best, and "max" or "min"; "" while that is not known."""
        if self.chosen.is_higher is None:
            return ("", "")
        return (self.chosen.name, "max" if self.chosen.is_higher else "min")

    def _save_again(self) -> None:
        """A part was changed after `end_epoch`, such as a scheduler stepped there."""
        self._write(self.best_epoch == self.epoch, keeps_images=True)

    def _write(self, is_best: bool = False, keeps_images: bool = False) -> None:
        self.is_due = False
        self.folder.add(self._state(), is_best, keeps_images=keeps_images)
        self.report.flush()  # a run that resumes here has the entries before

    def _state(self, is_inside: bool = False) -> State:
        sums = {}
        for name, (total, count, lost) in self._sums_of_all().items():
            sums[name] = [str(total), str(count), lost]
        state = super()._state(is_inside)
        parts = state.pop("parts")
        state |= {"scheduler": {}, **parts}
        state |= self._about()
        state |= self.place
        state |= self.chosen.state()
        state |= {
            "sums": sums,
            "seen": self.seen,
            "history": self.history,
        }
        return state
