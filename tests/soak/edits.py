"""What owners change in a generated project, in random pairs: it works, is stopped and resumes to
the bit, or is refused in one line.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import configurations
from configurations import Configuration
from generated import Done, Project, after_step, die
from interrupts import compare
from ranks import Patch
from setting import Setting

# Places in the files of the project as it is generated
IMPORTS = "\n\ndef main(argv"
OPTIMIZER = "    return torch.optim.AdamW(groups, lr, fused=True)"
SCHEDULER = "    return LambdaLR(optimizer, factor)"
OF_LOSS = "    loss_module = build_criterion(args, train_set, classes)\n"
INSIDE = "        # Batches have different numbers of labelled pixels"
AUTOCAST = "            with recipe.autocast(args.amp, images.device):\n"
FORWARD = "                outputs = ddp_model(images)"
BACKWARD = "            scaler.scale(loss).backward()\n"
ZERO = "        optimizer.zero_grad()\n"
FIRST = "        losses = []\n"  # before the passes of a step
END = "        run.end_step("
EVALUATION = (
    "            results, confusion, worst = evaluate(\n                model, val"
)
JUDGED = '            lr = optimizer.param_groups[-1]["lr"]'  # results are there
TO_DEVICE = "    model = model.to(device).to("
SETS = "    val_loader = ddpkit.val_loader("
EVALUATED = "        worst.update(logits, targets, indices)\n"
NORM = "            results['norm'] = float(sum(map(torch.norm, model.parameters())))\n"
TERM = "            loss = loss + 1e-4 * sum(map(torch.norm, ddp_model.parameters()))\n"
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(groups, lr, momentum=0.9, nesterov=True)",
    "adam": "torch.optim.Adam(groups, lr, amsgrad=True)",
    "rmsprop": "torch.optim.RMSprop(groups, lr, momentum=0.9, centered=True)",
    "adagrad": "torch.optim.Adagrad(groups, lr)",
    "one group": "torch.optim.AdamW(model.parameters(), lr)",
}
SCHEDULERS = {
    "one cycle": "torch.optim.lr_scheduler.OneCycleLR("
    "optimizer, 0.01, args.epochs * steps, cycle_momentum=False)",  # Adagrad has none
    "restarts": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)",
    "steps": "torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])",
    "chain": "torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR("
    "optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [4])",
}


@dataclass(frozen=True)
class Edit:
    """Texts and what stands for each; `place` tells which edits cannot go together."""

    name: str
    place: str
    changes: tuple[tuple[str, str], ...]
    task: str = ""  # for which it is, "": for both


def replaced(old: str, new: str) -> tuple[tuple[str, str], ...]:
    return ((old, new),)


def before(old: str, new: str) -> tuple[tuple[str, str], ...]:
    return ((old, new + old),)


EDITS = [
    Edit(name, "optimizer", replaced(OPTIMIZER, f"    return {code}"))
    for name, code in OPTIMIZERS.items()
]
EDITS += [
    Edit(name, "scheduler", replaced(SCHEDULER, f"    return {code}"))
    for name, code in SCHEDULERS.items()
]
EDITS += [
    Edit(
        "a loss that returns a mean",
        "loss",
        replaced(OF_LOSS, "    loss_module = nn.CrossEntropyLoss(ignore_index=255)\n"),
    ),
    Edit(
        "a loss of its own",
        "loss",
        replaced(OF_LOSS, "    loss_module = Own()\n")
        + before(
            IMPORTS,
            "\nclass Own(nn.Module):\n"
            "    def forward(self, outputs, targets):\n"
            "        each = nn.functional.cross_entropy("
            "outputs, targets, reduction='none', ignore_index=255)\n"
            "        return each.square().sum()\n\n"
            "    def count(self, targets):\n"
            "        return (targets != 255).sum()\n\n",
        ),
        "classification",
    ),
    Edit(
        "several outputs",
        "outputs",
        before(
            TO_DEVICE,
            "    forward = model.forward\n    model.forward = lambda x: (forward(x), x.mean())\n",
        )
        + replaced(FORWARD, "                outputs, _ = ddp_model(images)"),
    ),
    Edit(
        "leaves the loop early",
        "loop",
        before(INSIDE, "        if run.seen >= 16:\n            break\n"),
    ),
    Edit(
        "noise from torch",
        "images",
        before(
            AUTOCAST,
            "            images = images + 0.01 * torch.randn_like(images)\n",
        ),
    ),
    Edit(
        "zero_grad before backward",
        "zero",
        replaced(ZERO, "") + before(FIRST, ZERO),
    ),
    Edit(
        "weights that are clamped",
        "step",
        before(
            END,
            "        for w in ddp_model.parameters():\n            w.data.clamp_(-3, 3)\n",
        ),
    ),
    Edit(
        "an average of its own",
        "part",
        before(
            "    run = ddpkit.Run(",
            "    average = torch.optim.swa_utils.AveragedModel(trained)\n",
        )
        + replaced(
            "        flags=vars(args),\n",
            "        flags=vars(args),\n        average=average,\n",
        )
        + before(EVALUATION, "            average.update_parameters(trained)\n"),
    ),
    Edit(
        "a second value in the table",
        "row",
        before(JUDGED, NORM),
    ),
    Edit(
        "a subset to train on",
        "sets",
        before(
            SETS,
            "    part = range(3, min(23, len(train_set)))\n"
            "    train_set = torch.utils.data.Subset(train_set, part)\n",
        ),
    ),
    Edit(
        "two sets in one",
        "sets",
        before(
            SETS,
            "    train_set = torch.utils.data.ConcatDataset([train_set, train_set])\n",
        ),
    ),
    Edit(
        "the loss chooses the best",
        "best",
        before(IMPORTS, '\nBEST = "val_loss"\n'),
    ),
    Edit(
        "a term beside the loss",
        "term",
        before(BACKWARD, TERM),
    ),
    Edit(
        "evaluation that is left early",
        "evaluate",
        before(EVALUATED, "        if 0 in indices:\n            break\n"),
    ),
]


def case(chance: random.Random, folder: Path, setting: Setting) -> str:
    configuration = configurations.draw(chance)
    configuration.flags += ["--optimizer", "adamw"]  # the branch that is edited
    configuration.flags += ["--dist-timeout", "60"]  # a hang is a failure, soon
    some = [edit for edit in EDITS if edit.task in ("", configuration.data)]
    one, other = chance.sample(some, 2)
    chosen = [one] if one.place == other.place else [one, other]
    if configuration.data == "several labels":
        # of one class an image
        chosen = [edit for edit in chosen if edit.place != "loss"]
    names = " and ".join(edit.name for edit in chosen) or "nothing"
    print(names, "|", configuration)
    project = edited(setting.projects[configuration.task], folder / "project", chosen)
    whole = folder / "whole"
    out = folder / "out"
    done = run(project, configuration, setting, whole)
    if done.status:
        done.refused("")
        return f"{names}: {done.err.strip()} | {configuration}"
    done.ok()
    for _ in range(chance.randrange(1, 3)):
        step = chance.randrange(1, 9)
        run(project, configuration, setting, out, after_step(step, die))
    run(project, configuration, setting, out).ok()
    compare(whole, out)
    return f"{names} | {configuration}"


def edited(project: Project, folder: Path, edits: list[Edit]) -> Project:
    copy = project.copy(folder)
    for edit in edits:
        for old, new in edit.changes:
            places = [copy.folder / name for name in ("main.py", "recipe.py")]
            (path,) = [place for place in places if place.read_text().count(old) == 1]
            path.write_text(path.read_text().replace(old, new))
    return copy


def run(
    project: Project,
    configuration: Configuration,
    setting: Setting,
    out: Path,
    stop: Patch | None = None,
) -> Done:
    return project.run(
        configuration.words(setting, 2, out),
        on=configuration.ranks,
        patch=stop,
        draws=configuration.draws,
    )
