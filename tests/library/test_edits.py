"""What owners change in main.py and model.py: it works and resumes exactly, or is refused."""

import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from digest import digest
from generated import Done, Project, both_tasks, rows
from PIL import Image

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

        def start(data: Path, out: Path, *flags: object, ranks: int = 1, **how: object) -> Done:
            return copy.train(data, out, *flags, on=ranks, **how)

        return start

    return edit


IMPORTS = "\nCriterion = Callable"
OPTIMIZER = "    return torch.optim.AdamW(groups, lr"
SCHEDULER = "    return LambdaLR(optimizer, factor)"
CRITERION = "build_criterion(args, train_set, classes)"
END = "            run.end_step()"
SAVE = "            run.save()  # whatever fails from here on costs no epoch\n"
METRICS = '**results, "lr": lr}):'
OWNER = (IMPORTS, "\nimport owner\n" + IMPORTS)
NUMPY = (IMPORTS, "\nimport numpy as np\n" + IMPORTS)
IN_RECIPE = "\n\ndef choose_amp("
ONE_GROUP = (OPTIMIZER, OPTIMIZER.replace("groups", "model.parameters()"))
TWO_LAMBDAS = (SCHEDULER, "    return LambdaLR(optimizer, [factor, lambda step: 0.1 + step / 99])")
ONE_CYCLE = (
    SCHEDULER,
    "    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, args.epochs * steps)",
)
KILL = "__import__('os').kill(__import__('os').getpid(), 9)"  # an end without saving
KILLED = (END, f"{END}\n            if run.step == 9: {KILL}")


@pytest.mark.parametrize("change", [(TWO_LAMBDAS,), (ONE_CYCLE,)], ids=["lambdas", "cycle"])
def test_schedulers_resume(few: Path, tmp_path: Path, edited: Edited, change: tuple) -> None:
    """Several rates, or another class: killed in mid-epoch and resumed, the same bits."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ["--epochs", 2, "--save-every", 2]
    edited(*change)(few, whole, *more).ok()
    assert edited(*change, KILLED)(few, killed, *more).status == -9
    done = edited(*change)(few, killed, *more).ok()
    assert re.search("1 of 2 epochs done, best .* and 2 steps of the next", done.out)
    assert digest(whole) == digest(killed)
    assert ("OneCycleLR and the optimizer's" in done.out) == (change == (ONE_CYCLE,))


def test_another_optimizer_than_the_checkpoint_has(
    data: Path, trained: Path, tmp_path: Path, edited: Edited
) -> None:
    """Other groups, the same groups with other weights in them, another class: one line each."""
    out = shutil.copytree(trained, tmp_path / "out")
    more = data, out, "--epochs", 2
    before = {path.name: path.read_bytes() for path in out.glob("*.pt")}
    words = "last.pt", "--weights", "--output-dir"
    refusal = "checkpoint.load_states"
    edited(ONE_GROUP)(*more).refused(refusal, "57 + 113", "170", *words)
    sgd = (OPTIMIZER, "    return torch.optim.SGD(groups, lr)\n" + OPTIMIZER)
    edited(sgd)(*more).refused(refusal, "AdamW", "SGD", *words)
    edited(ONE_CYCLE)(*more).refused(refusal, "LambdaLR", "OneCycleLR", *words)
    assert before == {path.name: path.read_bytes() for path in out.glob("*.pt")}


def test_a_kill_between_the_best_and_the_last(
    data: Path, trained: Path, tmp_path: Path, edited: Edited
) -> None:
    """The epoch is evaluated again; its score is no better than best.pt's, but it is the best."""
    begin = "            if run.end_epoch("
    killed = edited((begin, f"            {KILL}\n{begin}"))
    assert killed(data, tmp_path, ranks=2).status == -9
    shutil.copy(trained / "best.pt", tmp_path)
    said = edited()(data, tmp_path, ranks=2, draws=True).ok().out
    for name in "examples.png", "per_class.csv", "confusion.png", "worst.png":
        assert (tmp_path / name).exists()
        assert name in said.splitlines()[-1]


EVALUATE = "            results, found = judge(model, val_loader)\n"


def test_kills_before_the_images(few: Path, tmp_path: Path, edited: Edited) -> None:
    """They come at the next start, of the epoch of best.pt: a later one is as good, not better.

    An epoch of which all steps were done before the start has no speed.
    """
    out, drawn = tmp_path / "out", ("examples.png", "per_class.csv", "confusion.png", "worst.png")
    more = few, out, "--epochs", 2, "--lr", 0.01
    tie = EVALUATE, f"{EVALUATE}            results[BEST] = 0.5\n"
    drawing = "                run.draw(found)\n"
    last_step = END, f"{END}\n            if run.step == 6: {KILL}"
    assert edited(tie, last_step)(*more, "--save-every", 1).status == -9
    assert (
        edited(tie, (drawing, f"                {KILL}\n{drawing}"))(*more, draws=True).status == -9
    )
    assert [path.name for path in out.glob("*.png")] == ["curves.png"]
    edited(tie)(*more, draws=True).ok()
    best = {name: (out / name).read_bytes() for name in drawn}
    speeds = [(row["img_per_s"], row["train_seconds"], row["data_wait"]) for row in rows(out)]
    assert speeds[0] == ("", "", "") and all(map(float, speeds[1][:2]))
    assert torch.load(out / "best.pt", weights_only=True)["epoch"] == 1

    for name, is_equal in ("best.pt", True), ("last.pt", False):
        edited()(few, out, "--eval-only", "--resume", out / name, draws=True).ok()
        assert ((out / "eval/worst.png").read_bytes() == best["worst.png"]) == is_equal

    (out / "examples.png").unlink()
    assert "done: best" in edited(tie)(*more, draws=True).ok().out
    assert best == {name: (out / name).read_bytes() for name in drawn}
    whole = (out / "metrics.csv").read_bytes()
    (out / "metrics.csv").write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    (out / "curves.png").unlink()
    for said in "done: best", "nothing left to do":
        assert said in edited(tie)(*more, draws=True).ok().out
        assert (out / "curves.png").exists()
        assert (out / "metrics.csv").read_bytes() == whole


def test_another_choice_of_the_best(
    project: Project, data: Path, own_data: Path, trained: Path, tmp_path: Path, edited: Edited
) -> None:
    """Another metric, another validation set: chosen anew, the former best is kept."""
    best = torch.load(trained / "best.pt", weights_only=True)
    other = edited((IMPORTS, '\nBEST = "top5"\n' + IMPORTS))
    sorted(own_data.glob("val/*/*"))[0].unlink()
    changes = {"metric": (other, data), "pictures": (edited(), own_data)}
    for name, (start, pictures) in changes.items():
        out = shutil.copytree(trained, tmp_path / name)
        done = start(pictures, out, "--epochs", 2).ok()
        assert re.search(
            r"best.pt: has the best top1 on 23 images \(\w+\) of epoch 1; renamed to best-1.pt",
            done.out,
        )
        kept = torch.load(out / "best-1.pt", weights_only=True)
        assert (kept["epoch"], kept["best"]) == (1, best["best"])
        new = torch.load(out / "best.pt", weights_only=True)
        assert new["epoch"] == 2
        metric = "top5" if name == "metric" else "top1"
        assert new["best"] == float(rows(out)[1][metric])
        # Not once more.
        done = start(pictures, out, "--epochs", 3).ok()
        assert "renamed to" not in done.out
        assert torch.load(out / "last.pt", weights_only=True)["best"] == max(
            float(row[metric]) for row in rows(out)[1:]
        )
        # Undone, it is chosen once more.
        done = project.train(data, out, "--epochs", 4, on=1).ok()
        assert "renamed to best-1.pt" in done.out
        best_now = torch.load(out / "best.pt", weights_only=True)["best"]
        assert best_now == float(rows(out)[3]["top1"])
        assert torch.load(out / "best-1.pt", weights_only=True)["best_of"] == new["best_of"]


def test_best_is_what_best_pt_has(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """Not what an older last.pt says, when that has been gone back to."""
    out = shutil.copytree(trained, tmp_path / "out")
    for name in ("best.pt", "last.pt"):
        state = torch.load(out / name, weights_only=True)
        state["best"] = 0.99 if name == "best.pt" else 0.0
        torch.save(state, out / name)
    before = (out / "best.pt").read_bytes()
    project.train(data, out, "--epochs", 2, on=1).ok()
    assert (out / "best.pt").read_bytes() == before
    assert torch.load(out / "last.pt", weights_only=True)["best"] == 0.99
    (out / "best.pt").write_bytes(before[:-99])
    done = project.train(data, out, "--epochs", 3, on=1).ok()
    assert "best.pt: not a readable checkpoint" in done.out
    assert "renamed to best.pt.corrupt" in done.out
    assert torch.load(out / "best.pt", weights_only=True)["epoch"] == 3
    # A new start is no continuation of the run that left a best.pt.
    for path in out.glob("last*"):
        path.unlink()
    done = project.train(data, out, "--lr", 0, on=1).ok()
    assert "of epoch 3; renamed to best-1.pt" in done.out
    assert torch.load(out / "best.pt", weights_only=True)["epoch"] == 1
    assert torch.load(out / "best-1.pt", weights_only=True)["epoch"] == 3


def test_back_to_the_best(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """--resume PATH within the run's own folder, started again: it goes on from what came of it."""
    out = shutil.copytree(trained, tmp_path / "out")
    first = shutil.copy(out / "best.pt", out / "first.pt")
    project.train(data, out, "--epochs", 3, on=1).ok()
    back = data, out, "--resume", first
    done = project.train(*back, "--epochs", 2, on=1).ok()
    assert "first.pt: 1 of 2 epochs done" in done.out
    assert torch.load(out / "best.pt", weights_only=True)["epoch"] <= 2  # none of what was left
    done = project.train(*back, "--epochs", 4, on=1).ok()
    assert "last.pt: 2 of 4 epochs done" in done.out
    assert [row["epoch"] for row in rows(out)] == ["1", "2", "3", "4"]
    # Damaged: the one before it, which has come of that path, too.
    (out / "last.pt").write_bytes((out / "last.pt").read_bytes()[:-99])
    done = project.train(*back, "--epochs", 5, on=1).ok()
    assert "last.pt.corrupt, continuing from last-1.pt" in done.out
    assert "last-1.pt: 3 of 5 epochs done" in done.out


def test_values_that_are_not_plain(few: Path, tmp_path: Path, edited: Edited) -> None:
    """NumPy's numbers among the metrics, a date among the flags: saved as plain types."""
    start = edited(
        (
            METRICS,
            '**results, "lr": lr, "auc": np.float64(0.5), "when": datetime.date(2026, 1, 2)}):',
        ),
        (IMPORTS, "\nimport datetime\n\nimport numpy as np\n" + IMPORTS),
        ("    args.amp = ", "    args.since = datetime.date(2026, 1, 1)\n    args.amp = "),
    )
    start(few, tmp_path).ok()
    for name in ("last.pt", "best.pt"):
        state = torch.load(tmp_path / name, weights_only=True)
        assert state["args"]["since"] == "2026-01-01"
        assert (state["history"][0]["auc"], state["history"][0]["when"]) == (0.5, "2026-01-02")
    assert "1 of 2 epochs done" in start(few, tmp_path, "--epochs", 2).ok().out
    assert [row["auc"] for row in rows(tmp_path)] == ["0.5", "0.5"]


def test_a_part_that_cannot_be_loaded(few: Path, tmp_path: Path, edited: Edited) -> None:
    """It is found out at the first save, which writes nothing."""
    part = "types.SimpleNamespace(state_dict=lambda: {'x': np.ones(1)}, load_state_dict=print)"
    start = edited(
        ("scaler=scaler,\n", f"scaler=scaler, mine={part},\n"),
        (IMPORTS, "\nimport types\n" + NUMPY[1]),
    )
    done = start(few, tmp_path, "--save-every", 1)
    done.refused("checkpoint.take_states", "mine", "ndarray")
    assert not list(tmp_path.glob("*.pt*"))


def test_tried_before_the_first_epoch(few: Path, tmp_path: Path, edited: Edited) -> None:
    """A metric that has several values, a BEST that does not exist, a bug in draw_example."""
    each = "torchmetrics.classification.MulticlassF1Score(6, average='none')"
    vector = (
        IMPORTS,
        f"\nimport torchmetrics\nbuild_metrics = lambda _: MetricCollection({{'f1': {each}}})\n"
        + IMPORTS,
    )
    bugs = {
        "vector": (vector, "metric f1 has 6 values"),
        "name": ((IMPORTS, "\nBEST = 'none'\n" + IMPORTS), "BEST of model.py is none"),
        "drawing": ((IMPORTS, "\ndraw_example = str.join\n" + IMPORTS), "TypeError"),
    }
    for name, (change, words) in bugs.items():
        out = tmp_path / name
        broken = edited(change)(few, out, draws=name == "drawing")
        assert broken.status == (1 if name == "drawing" else 2)
        assert words in broken.err.splitlines()[-1]
        assert not (out / "last.pt").exists()


def test_targets_that_are_no_classes(few: Path, tmp_path: Path, edited: Edited) -> None:
    """Soft labels, as a data set may return them, reach the loss as they are."""
    start = edited(
        (
            IMPORTS,
            "\nimport owner\n"
            "from owner import draw_hardened as draw_example\n"
            "from owner import hardened_metrics as build_metrics\n" + IMPORTS,
        ),
        (
            "    if not args.batch_size:",
            "    train_set, val_set = map(owner.Soft, (train_set, val_set))\n"
            "    if not args.batch_size:",
        ),
        (
            "            loss = run.loss(",
            "            assert targets.dtype == torch.float32 and targets.max() == 0.9\n"
            "            loss = run.loss(",
        ),
    )
    start(few, tmp_path, draws=True).ok()
    assert (tmp_path / "examples.png").exists()
    assert not (tmp_path / "worst.png").exists()


def test_networks_with_several_outputs(few: Path, tmp_path: Path, edited: Edited) -> None:
    """The loss takes them as they are, in float32."""
    changes = (
        (
            IMPORTS,
            "\nimport owner\nfrom owner import build_several as build_model\n" + IMPORTS,
        ),
        (CRITERION, CRITERION.replace("build_criterion", "owner.OfSeveral")),
    )
    edited(*changes)(few, tmp_path, ranks=2).ok()


def test_metrics_that_keep_lists(few: Path, tmp_path: Path, edited: Edited) -> None:
    """Average precision over ranks of which some get no batch: as on one rank."""
    lists = (
        IMPORTS,
        """
from torchmetrics.classification import MulticlassAUROC, MulticlassAveragePrecision
BEST = "ap"
build_metrics = lambda _: MetricCollection(
    {"ap": MulticlassAveragePrecision(6), "roc": MulticlassAUROC(6)}
)
"""
        + IMPORTS,
    )
    start = edited(lists)
    # One validation batch: two of three ranks hold nothing.
    start(few, tmp_path / "out", "--batch-size", 6, ranks=3, draws=True).ok()
    more = few, tmp_path / "out", "--batch-size", 6, "--eval-only"
    one, three = (start(*more, ranks=ranks).ok().out.splitlines()[-1] for ranks in (1, 3))
    assert one == three
    assert (tmp_path / "out" / "worst.png").exists()
    assert not (tmp_path / "out" / "per_class.csv").exists()  # no confusion matrix


def test_a_new_flag_of_the_network(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """Checkpoints from before it have its default, in --eval-only, predict.py and a resumed run."""

    def newer() -> None:
        import owner

        owner.add_flags()

    best, alone = trained / "best.pt", {"on": 1, "patch": newer}
    project.train(data, tmp_path, "--eval-only", "--resume", best, **alone).ok()
    words = [data / "val", "--checkpoint", best, "--output", tmp_path / "p"]
    project.run(*words, script="predict.py", **alone).ok()
    out = shutil.copytree(trained, tmp_path / "out")
    assert "1 of 2 epochs done" in project.train(data, out, "--epochs", 2, **alone).ok().out
    done = project.train(data, out, "--epochs", 3, "--drop", 0.5, **alone)
    assert "--drop 0.5 (was 0.25)" in done.ok().out


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shorter_epoch(few: Path, tmp_path: Path, edited: Edited, ranks: int) -> None:
    """All ranks may leave the loop, after the same step."""
    seed = "        images, targets = transform_batch("
    short = edited((seed, "        if i == 2: break\n" + seed))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    short(few, whole, "--epochs", 3, ranks=ranks).ok()
    assert [row["step"] for row in rows(whole)] == ["2", "4", "6"]
    kill = (
        SAVE,
        SAVE + f"            if run.step == 4: {KILL}\n",
    )
    shorter = (seed, "        if i == 2: break\n" + seed)
    edited(shorter, kill)(few, killed, "--epochs", 3, ranks=ranks)
    short(few, killed, "--epochs", 3, ranks=ranks).ok()
    assert digest(whole) == digest(killed)


INSIDE = "        images, targets = transform_batch("
WRAP = "                ddp_model = ddpkit.wrap(trained, device)"
UNUSED = "    model.spare, model.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)\n"
BEFORE = "    # `model` is evaluated, saved and predicted with;"


def in_loop(line: str) -> tuple[str, str]:
    return INSIDE, f"        {line}\n{INSIDE}"


def of_owner(function: str) -> tuple[str, str]:
    return IMPORTS, f"\nimport owner\n\nowner.{function}()\n" + IMPORTS


FREEZE = f"                model.fc.requires_grad_(False)\n{WRAP}; model.fc.requires_grad_()"
GPU = 'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. G")'
SAID = {
    "memory": (in_loop("torch.empty(10**15)"), "failures.of_memory", "memory"),
    "GPU": (in_loop(GPU), "failures.of_memory", "GPU memory (asked for 2.00 GiB)"),
    "unused": ((BEFORE, UNUSED + BEFORE), "failures.unused", "spare.weight, spare.bias, other.w"),
    "unfrozen": ((WRAP, FREEZE), "replicas.check_same", "fc.weight"),
    "leaves": (in_loop("if i == 3 and rank == 1: break"), "loop.mean_loss", "rank 1"),
    "size": (of_owner("narrow_dots"), "samples.getitems", "(3, 60, 64)"),
    "label": (of_owner("mislabel_dots"), "samples.parts", ".jpg: label 6"),
}


@pytest.mark.parametrize("name", SAID)
def test_one_line_for_what_torch_says_in_many(
    data: Path, tmp_path: Path, edited: Edited, name: str
) -> None:
    change, code, words = SAID[name]
    done = edited(change)(data, tmp_path / "out", "--dist-timeout", 20, ranks=2)
    done.refused(code, words)
    assert done.status == 2


LOSS = "            loss = run.loss(loss_sum, count)  # divided by what is equal on all ranks\n"
BACKWARD = "            scaler.scale(loss).backward()\n"
DIVIDE = "            run.divide_gradients(ddp_model)\n"
STEP = "            scaler.step(optimizer)\n"
ZERO = "            optimizer.zero_grad()\n"
OWN = (LOSS, "            loss = nn.functional.cross_entropy(outputs, targets)\n")
UNSCALED = (BACKWARD, "            loss.backward()\n")
FORWARD = "                outputs = ddp_model(images)\n"
PAST_DDP = FORWARD.replace("ddp_model", "ddp_model.module")
JUDGE = "judge(model, val_loader)\n            lr"
COPY = JUDGE.replace("model", "__import__('copy').deepcopy(model)")
SAMPLER = "        sampler=sampler,\n"
MISUSES = {
    "undivided": ([(DIVIDE, "")], "loop.end_step"),
    "own loss": ([OWN, UNSCALED], "replicas.finish"),
    "own loss, undivided": ([OWN, UNSCALED, (DIVIDE, "")], "loop.end_step"),
    "zeroed": ([(ZERO, ""), (DIVIDE, ZERO + DIVIDE)], "replicas.check_step"),
    "zeroed after the division": ([(ZERO, ""), (STEP, ZERO + STEP)], "replicas.check_step"),
    "unscaled": ([UNSCALED], "failures.of_torch"),
    "never zeroed": ([(ZERO, "")], "replicas.check_cleared"),
    "no end": ([(END, "            pass")], "loop.check_last_step"),
    "past DDP": (
        [(FORWARD, FORWARD.replace("ddp_model", "ddp_model.module"))],
        "replicas.check_called",
    ),
    "a copy": ([(JUDGE, COPY)], "loop.end_epoch"),
    "no average": ([(JUDGE, JUDGE.replace("model", "trained"))], "loop.end_epoch"),
    "half a loader": ([(SAMPLER, "        shuffle=True,\n")], "loading.is_ours"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuses_of_a_step(few: Path, tmp_path: Path, edited: Edited, name: str) -> None:
    """Refused at the first step; another network than the saved one after the first epoch."""
    changes, code = MISUSES[name]
    more = {"no average": ("--ema", 0.9), "unscaled": ("--amp", "fp16")}.get(name, ())
    done = edited(*changes)(few, tmp_path / "out", *more)
    done.refused(code)
    assert (tmp_path / "out" / "last.pt").exists() == (code == "loop.end_epoch")
    assert not (tmp_path / "out" / "best.pt").exists()


def test_zero_grad_before_backward(few: Path, tmp_path: Path, edited: Edited) -> None:
    """As in torch's tutorials."""
    before = [(ZERO, ""), (BACKWARD, f"{ZERO}{BACKWARD}")]
    edited(*before)(few, tmp_path / "out", ranks=2).ok()


TO_DEVICE = "    model = model.to(device)"
TUPLE = "    forward = model.forward\n    model.forward = lambda x: (forward(x), x.sum())\n"
OF_LOSS = "ddpkit.criterion(build_criterion(args, train_set, classes).to(device))"
OF_FIRST = "lambda out, target: nn.functional.cross_entropy(out[0], target, ignore_index=255)"
LOSSES = {
    "pair": [],
    "mean": [(OF_LOSS, "ddpkit.criterion(nn.CrossEntropyLoss(ignore_index=255))")],
    "tuple": [(TO_DEVICE, TUPLE + TO_DEVICE), (OF_LOSS, f"ddpkit.criterion({OF_FIRST})")],
}


@both_tasks
def test_losses_and_outputs(few: Path, tmp_path: Path, edited: Edited, project: Project) -> None:
    """A mean is weighed by its labels, void left out; metrics take the first of several outputs."""
    own = shutil.copytree(few, tmp_path / "own")
    for number, path in enumerate(sorted(own.glob("*/masks/*"))):
        mask = np.array(Image.open(path))
        mask[: number % 5 * 12] = 255
        Image.fromarray(mask).save(path)
    recipe = ("--optimizer", "sgd", "--lr", 0.01, "--warmup-epochs", 0)
    found = []
    for name, changes in LOSSES.items():
        out = tmp_path / name
        edited(*changes)(own, out, *recipe, ranks=2).ok()
        state = torch.load(out / "last.pt", weights_only=True)
        (row,) = rows(out)
        losses = [float(row["train_loss"]), float(row["val_loss"])]
        weights = torch.cat([weight.flatten().double() for weight in state["model"].values()])
        found.append((losses, weights))
    for losses, weights in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-6)
        assert (weights - found[0][1]).abs().max() < 1e-6
    if project.task == "segmentation":
        change = (OF_LOSS, "ddpkit.criterion(nn.CrossEntropyLoss())")
        done = edited(change)(own, tmp_path / "void", ranks=2)
        done.refused("failures.of_torch", "ignore_index=255")
