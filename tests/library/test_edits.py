"""What owners change in main.py and model.py: it works and resumes exactly, or is refused."""

import datetime
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from digest import digest
from generated import TASKS, Done, Project, in_soak, refusal, rows
from PIL import Image

from ddpkit.run import checkpoint, states

Edited = Callable[..., Callable[..., Done]]


@pytest.fixture
def edited(project: Project, tmp_path: Path) -> Edited:
    """Give main.py or recipe.py other lines; return what starts it, on one rank by default."""
    numbers = itertools.count()

    def edit(*changes: tuple[str, str]) -> Callable[..., Done]:
        copy = project.copy(tmp_path / f"edited{next(numbers)}")
        for old, new in changes:
            paths = [copy.folder / name for name in ("main.py", "recipe.py")]
            (path,) = [path for path in paths if old in path.read_text()]
            assert path.read_text().count(old) == 1, old
            path.write_text(path.read_text().replace(old, new))

        def start(
            data: Path, out: Path, *flags: object, ranks: int = 1, **how: object
        ) -> Done:
            return copy.train(data, out, flags, on=ranks, **how)

        return start

    return edit


IMPORTS = "\n\ndef main(argv"
OPTIMIZER = "    return torch.optim.AdamW(groups, lr"
SCHEDULER = "    return LambdaLR(optimizer, factor)"
END = "        run.end_step(losses, count, grad_norm)"
SAVE = "            run.save()  # an error below does not lose the epoch\n"
ONE_GROUP = (OPTIMIZER, OPTIMIZER.replace("groups", "model.parameters()"))
TWO_LAMBDAS = (
    SCHEDULER,
    "    return LambdaLR(optimizer, [factor, lambda step: 0.1 + step / 99])",
)
ONE_CYCLE = (
    SCHEDULER,
    "    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, args.epochs * steps)",
)
KILL = "__import__('os').kill(__import__('os').getpid(), 9)"  # an end without saving
KILLED = (END, f"{END}\n        if run.step == 9: {KILL}\n        ")


@pytest.mark.parametrize(
    "change", [in_soak(TWO_LAMBDAS, id="lambdas"), pytest.param(ONE_CYCLE, id="cycle")]
)
def test_schedulers_resume(
    few: Path, tmp_path: Path, edited: Edited, change: tuple
) -> None:
    """Several rates, or another class: killed in mid-epoch and resumed, the same bits."""
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    more = ["--epochs", 2, "--save-every", 2]
    edited(change)(few, whole, more).ok()
    assert edited(change, KILLED)(few, killed, more).status == -9
    done = edited(change)(few, killed, more).ok()
    assert re.search("1 of 2 epochs done, best .* and 2 steps of the next", done.out)
    assert digest(whole) == digest(killed)
    assert ("OneCycleLR and the optimizer's" in done.out) == (change == ONE_CYCLE)


def test_another_optimizer_than_the_checkpoint_has(
    data: Path, trained: Path, tmp_path: Path, edited: Edited
) -> None:
    """The same weights in other groups, another class of schedule: one line each."""
    out = shutil.copytree(trained, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.glob("*.pt")}
    for change, *words in (
        (ONE_GROUP, "its parameter groups had other weights"),
        (ONE_CYCLE, "LambdaLR", "OneCycleLR"),
    ):
        done = edited(change)(data, out, "--epochs", 2)
        done.refused("states.fitting", words, "last.pt", "--weights", "--output-dir")
    assert before == {path.name: path.read_bytes() for path in out.glob("*.pt")}


def contents(folder: Path) -> dict[Path, bytes]:
    """Of all files that are not hidden, as the lock is."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in found if path.name[0] != "."}


def test_another_choice_of_the_best(
    data: Path,
    own_data: Path,
    trained: Path,
    tmp_path: Path,
    edited: Edited,
) -> None:
    """Another metric, another validation set: chosen anew, once, and the former best is kept.

    A run with no epoch remaining changes no file.
    """
    before = torch.load(trained / "best.pt", weights_only=True)
    other = edited((IMPORTS, '\nBEST = "top5"\n' + IMPORTS))
    sorted(own_data.glob("val/*/*"))[0].unlink()
    for metric, start, images in ("top5", other, data), ("top1", edited(), own_data):
        out = shutil.copytree(trained, tmp_path / metric)
        finished = contents(out)
        assert "nothing left to do" in start(images, out, "--epochs", 1).ok().out
        assert contents(out) == finished
        done = start(images, out, "--epochs", 2).ok()
        assert re.search(
            r"best.pt: has the best top1 on 23 images \(\w+\) of epoch 1; renamed to best-1.pt",
            done.out,
        )
        kept = torch.load(out / "best-1.pt", weights_only=True)
        assert kept["epoch"] == 1
        assert kept["best"] == before["best"]
        new = torch.load(out / "best.pt", weights_only=True)
        assert new["epoch"] == 2
        assert new["best"] == float(rows(out)[1][metric])
        done = start(images, out, "--epochs", 3).ok()
        assert "renamed to" not in done.out
        scores = [float(row[metric]) for row in rows(out)[1:]]
        assert torch.load(out / "last.pt", weights_only=True)["best"] == max(scores)


def test_best_is_what_best_pt_has(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """Not what an older last.pt says, when that has been gone back to; a damaged one is none."""
    out = shutil.copytree(trained, tmp_path / "out")
    for name, score in ("best.pt", 0.99), ("last.pt", 0.0):
        state = torch.load(out / name, weights_only=True)
        torch.save({**state, "best": score}, out / name)
    before = (out / "best.pt").read_bytes()
    project.train(data, out, "--epochs", 2, on=1).ok()
    assert (out / "best.pt").read_bytes() == before
    assert torch.load(out / "last.pt", weights_only=True)["best"] == 0.99
    (out / "best.pt").write_bytes(before[:-99])
    done = project.train(data, out, "--epochs", 3, on=1).ok()
    assert "best.pt: not a readable checkpoint" in done.out
    assert "renamed to best.pt.corrupt" in done.out
    assert torch.load(out / "best.pt", weights_only=True)["epoch"] == 3


def test_back_to_the_best(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """--resume PATH within the run's own folder, started again: it goes on from what came of it."""
    out = shutil.copytree(trained, tmp_path / "out")
    first = shutil.copy(out / "best.pt", out / "first.pt")
    project.train(data, out, "--epochs", 3, on=1).ok()
    done = project.train(data, out, "--resume", first, "--epochs", 2, on=1).ok()
    assert "first.pt: 1 of 2 epochs done" in done.out
    # none of what was left
    assert torch.load(out / "best.pt", weights_only=True)["epoch"] <= 2
    done = project.train(data, out, "--resume", first, "--epochs", 3, on=1).ok()
    assert "last.pt: 2 of 3 epochs done" in done.out
    assert [row["epoch"] for row in rows(out)] == ["1", "2", "3"]


def test_what_is_saved() -> None:
    """Plain types; a part that could not be loaded is found out at the first save."""
    flags = {
        "since": datetime.date(2026, 1, 2),
        "rate": np.float64(0.5),
        "data": Path("a"),
    }
    assert (
        str(checkpoint.to_plain(flags))
        == "{'since': '2026-01-02', 'rate': 0.5, 'data': 'a'}"
    )
    part = SimpleNamespace(state_dict=lambda: {"x": np.ones(1)})
    with refusal("states.take_states", "mine", "ndarray"):
        states.take_states({"mine": part})


def test_tried_before_the_first_epoch(
    few: Path, tmp_path: Path, edited: Edited
) -> None:
    """A metric that has several values, a BEST that does not exist, a bug in draw_example."""
    each = "torchmetrics.classification.MulticlassF1Score(6, average='none')"
    vector = (
        IMPORTS,
        f"\nimport torchmetrics\nbuild_metrics = lambda *_: MetricCollection({{'f1': {each}}})\n"
        + IMPORTS,
    )
    bugs = {
        "vector": (vector, "metric f1 has 6 values"),
        "name": ((IMPORTS, "\nBEST = 'none'\n" + IMPORTS), "BEST in model.py is none"),
        "drawing": ((IMPORTS, "\ndraw_example = str.join\n" + IMPORTS), "TypeError"),
    }
    for name, (change, words) in bugs.items():
        broken = edited(change)(few, tmp_path / name, draws=name == "drawing")
        assert broken.status == (1 if name == "drawing" else 2)
        assert words in broken.err.splitlines()[-1]
        assert not (tmp_path / name / "last.pt").exists()


def test_targets_that_are_no_classes(few: Path, tmp_path: Path, edited: Edited) -> None:
    """Soft labels, as a dataset may return them, reach the loss as they are."""
    start = edited(
        (
            IMPORTS,
            "\nimport owner\n"
            "from owner import draw_hardened as draw_example\n"
            "from owner import hardened_metrics as build_metrics\n" + IMPORTS,
        ),
        (
            "    val_loader = ddpkit",
            "    train_set, val_set = map(owner.Soft, (train_set, val_set))\n"
            "    val_loader = ddpkit",
        ),
    )
    start(few, tmp_path, draws=True).ok()
    assert (tmp_path / "examples.png").exists()
    assert (tmp_path / "worst.png").exists()


def test_metrics_that_keep_lists(few: Path, tmp_path: Path, edited: Edited) -> None:
    """Average precision over ranks of which one gets no batch: as on one rank."""
    lists = """
from torchmetrics.classification import MulticlassAveragePrecision
BEST = "ap"
build_metrics = lambda *_: MetricCollection({"ap": MulticlassAveragePrecision(6)})
"""
    start = edited((IMPORTS, lists + IMPORTS))
    out = tmp_path / "out"
    more = ["--batch-size", 6]  # one batch of validation
    start(few, out, more, ranks=2, draws=True).ok()
    one = start(few, out, more, "--eval-only", "--json", ranks=1).ok()
    two = start(few, out, more, "--eval-only", "--json", ranks=2).ok()
    assert one.out.splitlines()[-1] == two.out.splitlines()[-1]
    assert (out / "worst.png").exists()
    assert not (out / "per_class.csv").exists()  # no confusion matrix


INSIDE = "        # Batches have different numbers"
SHORTER = (INSIDE, f"        if run.step == 2 * run.epoch + 2: break\n{INSIDE}")


def test_a_shorter_epoch(few: Path, tmp_path: Path, edited: Edited) -> None:
    """All ranks may leave the loop, after the same step; killed after that, the same bits."""
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    edited(SHORTER)(few, whole, "--epochs", 3, ranks=2).ok()
    assert [row["step"] for row in rows(whole)] == ["2", "4", "6"]
    kill = SAVE, f"{SAVE}            if run.step == 4: {KILL}\n"
    assert edited(SHORTER, kill)(few, killed, "--epochs", 3, ranks=2).status == -9
    edited(SHORTER)(few, killed, "--epochs", 3, ranks=2).ok()
    assert digest(whole) == digest(killed)


LOSS = "            loss = criterion(logits, targets) * world_size / count\n"
ZERO = "        optimizer.zero_grad()\n"
JUDGE = "                model, val_loader, criterion, metrics, args\n            )\n            lr"
SAMPLER = "        accumulate=args.accumulate,\n        seed=args.seed,\n"
WRAPPED = "        ddp_model = wrap(trained, args.virtual_ranks)\n        # A resumed"
FREEZE = "        model.fc.requires_grad_(False)\n"
FREEZE += "        ddp_model = wrap(trained, args.virtual_ranks)\n"
FREEZE += "        model.fc.requires_grad_()\n"
FREEZE += "        # A resumed"
FROZEN = "        ddp_model = wrap(trained, args.virtual_ranks)\n"
FROZEN += "        model.fc.requires_grad_(False)\n        # A resumed"
MISUSES = {  # more of a step: test_own_steps.py
    "a sum": (
        [(LOSS, LOSS.replace(" * world_size / count", ""))],
        "replicas.check_slopes",
    ),
    "a copy": (
        [(JUDGE, JUDGE.replace("model", "__import__('copy').deepcopy(model)"))],
        "loop.end_epoch",
    ),
    "another order": ([(SAMPLER, "        shuffle=True,\n")], "loading.init"),
    "leaves": (
        [(INSIDE, f"        if run.step == 3 and rank == 1: break\n{INSIDE}")],
        "loop.means",
    ),
    "unfrozen": ([(WRAPPED, FREEZE)], "replicas.check_same"),
    "frozen": ([(WRAPPED, FROZEN)], "failures.of_torch"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuses_of_an_epoch(
    data: Path, tmp_path: Path, edited: Edited, name: str
) -> None:
    """Refused at the first step; ranks or networks that differ at the end of the first epoch."""
    changes, code = MISUSES[name]
    done = edited(*changes)(data, tmp_path / "out", "--dist-timeout", 20, ranks=2)
    words = {
        "leaves": ["rank 1"],
        "frozen": ["fc.weight", "no gradient"],
        "unfrozen": [
            "fc.weight differs",
            "after unfreezing weights wrap the model in DDP again",
        ],
    }
    done.refused(code, *words.get(name, []))
    assert (tmp_path / "out" / "last.pt").exists() == (code == "loop.end_epoch")
    assert not (tmp_path / "out" / "best.pt").exists()


BEST = "            if is_best:\n"
COUNTED = """
            waited = 0 if means['train_loss'] < lowest else waited + 1
            lowest = min(lowest, means['train_loss'])
            args.worse += 2
            early.waited += 3
            if run.epoch == 2:
                break
"""


EARLY = "\n\nclass Early:\n    waited = 0\n\n    def __init__(self):\n        self.waited = 0\n"
UNFROZEN = """
            if epoch == 1:
                model.fc.requires_grad_(True)
                ddp_model = wrap(trained, args.virtual_ranks)
            means = """


def test_unfrozen_in_one_epoch(few: Path, tmp_path: Path, edited: Edited) -> None:
    """A run that resumes in a later epoch says that the weights are frozen again."""
    start = edited(
        (WRAPPED, f"        model.fc.requires_grad_(False)\n{WRAPPED}"),
        ("            means = ", UNFROZEN.lstrip("\n")),
    )
    out = tmp_path / "out"
    more = ["--patience", 0, "--epochs"]
    line = "model.requires_grad not restored"
    assert line not in start(few, out, more, 2).ok().out
    assert line in start(few, out, more, 3).ok().out


def test_a_counter_of_epochs(few: Path, tmp_path: Path, edited: Edited) -> None:
    """A line says that it does not survive a resume, and one that the loop ended."""
    start = edited(
        (IMPORTS, f"{EARLY}{IMPORTS}"),
        (
            WRAPPED,
            "        lowest, waited, args.worse, early = 9.0, 0, 0, Early()\n"
            + WRAPPED,
        ),
        (BEST, COUNTED.lstrip("\n") + BEST),
    )
    done = start(few, tmp_path / "out", "--epochs", 3).ok()
    (changed,) = re.findall("warning: (.*) changed with", done.out)
    assert set(changed.split(", ")) == {"lowest", "args.worse", "early.waited"}
    assert "the loop ended after epoch 2 of 3: the run is unfinished" in done.out
    assert "use --patience or --epochs 2" in done.out
    done = start(few, tmp_path / "whole", "--epochs", 2, "--patience", 1).ok()
    assert "the loop ended" not in done.out


TO_DEVICE = "    model = model.to(device)"
DICT = "    forward = model.forward\n"
DICT += "    model.forward = lambda x: {'aux': x.sum(), 'out': forward(x)}\n"
OF_LOSS = "    loss_module = build_criterion(args, train_set, classes)\n"
FUNCTION = "lambda output, target: nn.functional.cross_entropy(output, target, ignore_index=255)"
LOSSES = {
    "sum": [],
    "mean": [(OF_LOSS, "    loss_module = nn.CrossEntropyLoss(ignore_index=255)\n")],
    "function, network of a dict, zero_grad before backward, and DDP's own defaults": [
        (TO_DEVICE, DICT + TO_DEVICE),
        (OF_LOSS, f"    loss_module = {FUNCTION}\n"),
        ("(loss_module, classes)", "(loss_module, classes, reduction='mean')"),
        (ZERO, ""),
        (
            "        losses = []\n",
            f"        losses = []\n{ZERO}",
        ),
        (", gradient_as_bucket_view=True)", ")"),
    ],
}


@pytest.mark.parametrize(
    "project",
    [in_soak(TASKS[0]), TASKS[1]],
    indirect=True,
)
def test_losses_and_outputs(
    few: Path, tmp_path: Path, edited: Edited, project: Project
) -> None:
    """A mean is weighed by its labels, void left out; metrics take the logits of a dict."""
    own = shutil.copytree(few, tmp_path / "own")
    for number, path in enumerate(sorted(own.glob("*/masks/*"))):
        mask = np.array(Image.open(path))
        mask[: number % 5 * 24] = 255
        Image.fromarray(mask).save(path)
    recipe = ("--optimizer", "sgd", "--lr", 0.01, "--warmup-epochs", 0)
    found = []
    for name, changes in LOSSES.items():
        out = tmp_path / name
        edited(*changes)(own, out, *recipe, ranks=2).ok()
        state = torch.load(out / "last.pt", weights_only=True)
        (row,) = rows(out)
        losses = [float(row["train_loss"]), float(row["val_loss"])]
        weights = torch.cat(
            [weight.flatten().double() for weight in state["model"].values()]
        )
        found.append((losses, weights))
    for losses, weights in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=2e-5)
        # Rounding: of the same mean, and then of BatchNorm on few values.
        assert torch.allclose(weights, found[0][1], rtol=1e-4, atol=1e-4)
    if project.task == "segmentation":
        change = (OF_LOSS, "    loss_module = nn.CrossEntropyLoss()\n")
        done = edited(change)(own, tmp_path / "void", ranks=2)
        done.refused("failures.of_torch", "ignore_index=255")


DRAW = "                run.draw(confusion, worst)\n"
TEST = f"""{DRAW}        model.load_state_dict({{name: torch.zeros_like(each) for name, each in
            model.state_dict().items()}})
        evaluate(model, val_loader, criterion, metrics, args)
"""


def test_other_weights_after_the_loop(
    few: Path, tmp_path: Path, edited: Edited
) -> None:
    """Within the block, as for a test: the checkpoints are those of before; a line says so."""
    whole, tested = tmp_path / "whole", tmp_path / "tested"
    edited()(few, whole).ok()
    done = edited((DRAW, TEST))(few, tested).ok()
    assert (
        "model changed after the last epoch: the checkpoints keep what was" in done.out
    )
    assert digest(whole) == digest(tested)
    best = [checkpoint.read(out / "best.pt")["model"] for out in (whole, tested)]
    assert all(map(torch.equal, *(each.values() for each in best)))


MIDWAY = """
        if run.step == 1:
            __import__('os').kill(__import__('os').getpid(), 15)
            __import__('time').sleep(2)
            evaluate(run.model, run.val_loader, criterion, args.metrics, args)
"""
MAKE = "    report = ddpkit.Reporter("
METRICS = MAKE, "    args.metrics = metrics\n" + MAKE


def test_an_evaluation_within_a_step(few: Path, tmp_path: Path, edited: Edited) -> None:
    """A signal that comes in it stops the run at the step's end, which is what is saved."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    edited()(few, whole).ok()
    assert edited(METRICS, (END, MIDWAY + END))(few, stopped).status == 75
    assert "and 2 steps of the next" in edited()(few, stopped).ok().out
    assert digest(whole) == digest(stopped)


BATCHES = (
    "    for images, targets, *_, indices in ddpkit.eval_batches(loader, model):\n"
)
DIRECT = """    model.eval()
    print("sizes", len(loader), loader.batch_size, len(loader.dataset))
    for images, targets, *_, indices in loader:
        assert images.dtype == torch.float32
"""


def test_a_loader_that_is_evaluated_by_hand(
    few: Path, tmp_path: Path, edited: Edited
) -> None:
    """len(loader) and what else a DataLoader has, also of the batch that is tried at the start."""
    done = edited((BATCHES, DIRECT))(few, tmp_path / "by hand").ok()
    edited()(few, tmp_path / "out").ok()
    small, whole = re.findall(r"sizes (\S+) (\S+) (\S+)", done.out)
    assert small[0] == "1"
    assert small[1:] == whole[1:]
    results = [rows(tmp_path / name)[-1]["val_loss"] for name in ("by hand", "out")]
    assert results[0] == results[1]


MEANS = "    return run.means()\n"


def test_statistics_without_means(few: Path, tmp_path: Path, edited: Edited) -> None:
    """At the end of its steps all ranks have rank 0's, whoever adds up the loss."""
    note = "out = f'{args.output_dir}/rank{torch.distributed.get_rank()}'"
    note += "; torch.save(dict(model.named_buffers()), out)"
    start = edited(
        (MEANS, "    return {'train_loss': 1.0}\n"),
        (SAVE, f"{SAVE}            {note}\n"),
    )
    out = tmp_path / "out"
    start(few, out, ranks=2).ok()
    of_ranks = [torch.load(out / f"rank{rank}") for rank in (0, 1)]
    assert of_ranks[0]
    for name, each in of_ranks[0].items():
        assert torch.equal(each, of_ranks[1][name]), name


def test_ddp_in_place_of_the_model(few: Path, tmp_path: Path, edited: Edited) -> None:
    """Wrapped at once, as in most scripts: it is evaluated, saved and read as the model is."""
    made = "    # criterion(outputs, targets) is the sum of the losses of a batch's labels, and\n"
    early = f"    model = DistributedDataParallel(model)\n{made}"
    own = WRAPPED, "        ddp_model = model\n        # A resumed"
    start = edited((made, early), own)
    start(few, tmp_path / "out", ranks=2).ok()
    assert "trained" not in checkpoint.read(tmp_path / "out" / "last.pt")
    start(few, tmp_path / "out", "--epochs", 2).ok()
    start(few, tmp_path / "out", "--eval-only").ok()


def test_a_row_with_the_epoch(few: Path, tmp_path: Path, edited: Edited) -> None:
    """Counted by the person from 0: metrics.csv counts from 1, as ever."""
    row = "{**means, **results, "
    edited((row, row.replace("{", '{"epoch": epoch, ', 1)))(few, tmp_path / "out").ok()
    assert [each["epoch"] for each in rows(tmp_path / "out")] == ["1"]


def test_without_the_block(few: Path, tmp_path: Path, edited: Edited) -> None:
    """No signal would stop the loop."""
    done = edited(("    with run:\n", "    if run:\n"))(few, tmp_path / "out")
    done.refused("loop.begin_steps", "with run:")
