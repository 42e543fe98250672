"""The diffs of EDITS.md: any two apply, each is clean, most resume to the bit and work."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import edits_page
import numpy as np
import pytest
import torch
from digest import digest
from generated import (
    TASKS,
    Done,
    Project,
    after_step,
    both_but_one_in_soak,
    both_tasks,
    die,
    rows,
    run,
)

OF_TORCHVISION = """

from PIL import Image


class Downloaded(torch.utils.data.Dataset):
    classes = list("abcdef")

    def __init__(self, root, split="", train=True, **options):
        self.total, self.options = (26 if train and split != "test" else 6), options

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        image = Image.new("RGB", (48, 40), (index * 9, 99, 9))
        if "transforms" in self.options:
            return self.options["transforms"](image, Image.new("L", (48, 40), 1 + index % 3))
        return self.options["transform"](image), index % 6


torchvision.datasets.CIFAR10 = torchvision.datasets.OxfordIIITPet = Downloaded
"""
OF_HUGGING_FACE = """
from types import SimpleNamespace

from PIL import Image


class Part(list):
    features = {"label": SimpleNamespace(names=list("abcdef"))}

    def with_transform(self, transform):
        self.transform = transform
        return self

    def __getitem__(self, index):
        image, mask = Image.new("RGB", (48, 40), (index * 9, 99, 9)), Image.new("L", (48, 40))
        batch = self.transform({"image": [image], "label": [index % 6], "mask": [mask]})
        return {"id": index, **{name: part[0] for name, part in batch.items()}}


class Parts(dict):
    def with_transform(self, transform):
        return {name: part.with_transform(transform) for name, part in self.items()}


def load_dataset(name):
    return Parts(train=Part(range(26)), test=Part(range(6)))
"""
ALBUMENTATIONS = """
import numpy as np

CLAHE = GaussNoise = str


class Compose:
    def __init__(self, transforms):
        self.random = np.random.default_rng()

    def set_random_seed(self, seed):
        self.random = np.random.default_rng(seed)

    def __call__(self, image, **mask):
        noise = self.random.integers(0, 128, image.shape, np.uint8)
        return {"image": image // 2 + noise, **mask}
"""
SKIPPING = """
import torch


class Skipping(nn.Linear):
    def forward(self, features):
        is_left_out = self.training and torch.rand(()) < 0.5
        return super().forward(features) + (0 if is_left_out else self.spare)


build_whole = build_model


def build_model(args, classes, channels=3, pretrained=None):
    model = build_whole(args, classes, channels, pretrained)
    model.fc = Skipping(model.fc.in_features, len(classes))
    model.fc.spare = nn.Parameter(torch.zeros(len(classes)))
    return model
"""
# In place of packages and downloads, and what a recipe is for: at the end of these
# files.
FILES = {
    "torchvision": ("dataset.py", OF_TORCHVISION),
    "hugging_face": ("datasets.py", OF_HUGGING_FACE),
    "augmentation": ("albumentations.py", ALBUMENTATIONS),
    "unused": ("model.py", SKIPPING),
}


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def git_apply(diff: str, folder: Path) -> str:
    """Apply a diff to a folder, or change nothing and return why."""
    command = ["git", "apply", "-"]
    done = subprocess.run(
        command, cwd=folder, input=diff, capture_output=True, text=True
    )
    return done.stderr if done.returncode else ""


class Edited:
    """Runs of a project with the edit of a recipe."""

    def __init__(self, project: Project, data: Path, folder: Path, name: str) -> None:
        self.data = data
        self.out = folder / "out"
        self.project = project.copy(folder / "edited")
        self.folder = self.project.folder
        assert not git_apply(edits_page.diffs(project.task)[name], self.folder)
        if name in FILES:
            file, text = FILES[name]
            append(self.folder / file, text)

    def run(self, name: str, *more: object, ranks: int = 2, stop: int = 0) -> Done:
        out = self.out / name
        kill = None
        if stop:
            kill = after_step(stop, die)
        return self.project.train(self.data, out, more, on=ranks, patch=kill)

    def result(self, *more: object, epochs: int = 1) -> dict[str, float]:
        """Of a run, which has the bits of one that goes on in the middle of its last epoch."""
        every = 2 if epochs == 1 else 4  # of three steps an epoch
        words = ["--epochs", epochs, "--save-every", every, more]
        self.run("whole", words).ok()
        self.go_back()
        assert " of the next" in self.run("resumed", words).ok().out
        assert digest(self.out / "whole") == digest(self.out / "resumed")
        return self.evaluate(more)

    def go_back(self) -> None:
        """Make "resumed" of "whole", as it was when its former checkpoint was the latest."""
        resumed = shutil.copytree(self.out / "whole", self.out / "resumed")
        (resumed / "last-1.pt").replace(resumed / "last.pt")

    def evaluate(self, *more: object) -> dict[str, float]:
        said = self.run("whole", "--eval-only", "--json", more, ranks=1).ok().out
        return json.loads(said.splitlines()[-1])

    def state(self, name: str = "whole/last.pt") -> dict:
        return torch.load(self.out / name, weights_only=True)


@pytest.fixture
def edited(project: Project, few: Path, tmp_path: Path) -> Callable[[str], Edited]:
    return lambda name: Edited(project, few, tmp_path, name)


# The second of each replaces what the first has changed.
EXCLUSIVE = {
    ("metric", "regression"),
    ("balanced", "loader"),
    ("loader", "balanced"),
    ("regression", "metric"),
    ("loss", "regression"),
    ("regression", "loss"),
    ("parts", "regression"),
    ("regression", "parts"),
    ("regression", "heatmap"),
}


def test_page() -> None:
    remedy = f"python {edits_page.__file__}"
    assert edits_page.PAGE.read_text() == edits_page.page(), remedy
    assert edits_page.SITE_PAGE.read_text() == edits_page.site_page(), remedy


@pytest.mark.parametrize("task", TASKS)
def test_two_edits_apply(task: str) -> None:
    """In any order, and what they make is Python."""
    diffs = edits_page.diffs(task)
    files = edits_page.generated(task)
    wrong = set()
    for first in diffs:
        once = edits_page.apply(diffs[first], files)
        for second in diffs.keys() - {first}:
            try:
                twice = edits_page.apply(diffs[second], once)
            except ValueError:
                wrong.add((first, second))
                continue
            for file, lines in twice.items():
                if lines != once.get(file):
                    ast.parse("\n".join(lines))
    assert wrong == {pair for pair in EXCLUSIVE if set(pair) <= diffs.keys()}


@both_tasks
def test_diffs_apply_and_are_clean(project: Project, tmp_path: Path) -> None:
    """Each alone, by git and ruff."""
    faults = {}
    for name, diff in edits_page.diffs(project.task).items():
        copy = project.copy(tmp_path / name).folder
        faults[name] = git_apply(diff, copy)
    assert {*faults.values()} == {""}, faults
    for words in ("check",), ("format", "--check"):
        done = run([sys.executable, "-m", "ruff", *words, "."], tmp_path)
        assert done.status == 0, done.out


@pytest.mark.soak
def test_types(projects: Callable[[str], Project], tmp_path: Path) -> None:
    """Of both projects, without edits and with them.

    As few copies as the diffs fit into take turns in one folder, where mypy keeps torch.
    """
    copies: dict[Path, list[str]] = {}
    for task in TASKS:
        whole = projects(task).copy(tmp_path / "as generated" / task).folder
        copies[whole] = [f"no edit, {task}"]
        for name, diff in edits_page.diffs(task).items():
            if task != TASKS[0] and ("main.py" in diff or "recipe.py" in diff):
                continue
            fits = (folder for folder in copies if folder.parent.name == task)
            fits = (folder for folder in fits if not git_apply(diff, folder))
            folder = next(fits, None)
            if folder is None:
                folder = projects(task).copy(tmp_path / task / name).folder
                assert not git_apply(diff, folder)
            copies.setdefault(folder, []).append(name)
    turn = projects(TASKS[0]).copy(tmp_path / "turn").folder
    command = [sys.executable, "-m", "mypy.dmypy", "--status-file", tmp_path / "mypy"]
    faults = {}
    try:
        for folder, names in copies.items():
            for path in turn.glob("*.py"):
                path.unlink()
            for path in folder.glob("*.py"):
                shutil.copy(path, turn)
            done = run([*command, "run", "--", "."], turn)
            faults[" ".join(names)] = done.out if done.status else ""
    finally:
        run([*command, "stop"], turn)
    assert {*faults.values()} == {""}, faults


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
@pytest.mark.parametrize(
    "name", ["torchvision", "hugging_face", "parts", "network", "augmentation", "loss"]
)
def test_diffs_of_a_task(
    name: str, project: Project, edited: Callable[[str], Edited]
) -> None:
    """Those of dataset.py and model.py."""
    one = edited(name)
    if name == "torchvision":
        one.data = one.out / {TASKS[0]: "cifar10", TASKS[1]: "pets"}[project.task]
    if name == "hugging_face":
        one.data = Path("hf:any")
    flags = {"network": ["--arch", "mine"]}
    of_loss = {
        TASKS[0]: ["--class-weights", "auto"],
        TASKS[1]: ["--loss", "ce+tversky"],
    }
    flags["loss"] = of_loss[project.task]
    found = one.result(*flags.get(name, []))
    assert {TASKS[0]: "top1", TASKS[1]: "miou"}[project.task] in found


def test_gradients_are_clipped_in_each_step(edited: Callable[[str], Edited]) -> None:
    """Also in those that are not logged: how often that is changes no weight."""
    one = edited("clip_value")
    weights = []
    for every in 0, 1, 2:
        one.run(f"{every}", "--log-every", every, "--optimizer", "sgd").ok()
        weights.append(one.state(f"{every}/last.pt")["model"])
    for other in weights[1:]:
        for name, weight in weights[0].items():
            assert torch.equal(weight, other[name])


def test_loaders_of_your_own(edited: Callable[[str], Edited]) -> None:
    """What they give up is said; each rank takes its share, or training does not begin."""
    own = edited("loader")
    main = own.folder / "main.py"
    plain = main.read_text()
    assert own.run("plain", "--epochs", 2, "--save-every", 2, stop=5).status == -9
    said = own.run("plain", "--epochs", 2).ok().out
    assert "reading 1 batches again to skip them" in said
    last = own.state("plain/last.pt")
    assert last["epoch"] == 2
    assert last["step"] == 6
    own.run("whole", "--epochs", 2).ok()
    assert digest(own.out / "whole") == digest(own.out / "plain")
    sampler = "torch.utils.data.DistributedSampler"
    share = "range(torch.distributed.get_rank(), len(train_set), 2)"
    main.write_text(plain.replace(f"{sampler}(train_set, seed=args.seed)", share))
    own.run("shares").refused("other_loaders.check_share", "the train loader")
    val = plain[plain.index("    val_loader = ") : plain.index("    # The network")]
    other = f"    val_loader = DataLoader(val_set, 4, sampler={sampler}(val_set))\n"
    text = plain.replace(val, other).replace("val_loader.channels", "3")
    main.write_text(text)
    own.run("repeats").refused("other_loaders.check_share", "the val loader")


def test_learning_rate_finder(edited: Callable[[str], Edited]) -> None:
    """A step at each rate, which all ranks take; nothing is saved, and a run starts as before."""
    one = edited("lr_finder")
    said = one.run("found", "--find-lr", 12).ok().out
    found = re.findall(r"^rate (\S+)  loss (\d+\.\d{4})$", said, re.MULTILINE)
    rates = [float(rate) for rate, _ in found]
    assert rates == pytest.approx(10 ** (np.arange(len(rates)) / 2 - 6), rel=0.1)
    losses = [float(loss) for _, loss in found]
    assert len(losses) == 12 or losses[-1] >= 3.99 * min(losses)
    (lowest,) = re.findall(r"^lowest at (\S+): try --lr ", said, re.MULTILINE)
    assert float(lowest) == rates[losses.index(min(losses))]
    assert not (one.out / "found/last.pt").exists()
    one.run("found").ok()
    assert one.state("found/last.pt")["step"] == 3


def test_teacher(edited: Callable[[str], Edited]) -> None:
    """It changes what is learned and is in no checkpoint."""
    pupil = edited("teacher")
    pupil.run("alone").ok()
    pupil.result("--teacher", pupil.out / "alone/best.pt")
    assert digest(pupil.out / "whole") != digest(pupil.out / "alone")
    assert pupil.state().keys() == pupil.state("alone/last.pt").keys()


def test_discriminator(edited: Callable[[str], Edited]) -> None:
    """It learns; its weights are compared, too."""
    both = edited("discriminator")
    both.result("--accumulate", 1)
    now = both.state()
    before = both.state("whole/last-1.pt")
    assert not torch.equal(now["adversary"]["0.bias"], before["adversary"]["0.bias"])
    assert now["adversary_optimizer"]["state"]["adversary.0.weight"]["step"] == 3
    file = both.folder / "adversary.py"
    file.write_text(file.read_text().replace("self.ddp_network(", "self.network("))
    both.run("bypassed").refused("replicas.check_same", "0.weight")


def test_second_validation_set(
    project: Project, tmp_path: Path, edited: Callable[[str], Edited]
) -> None:
    """Its columns are what --eval-only finds; the first set decides which weights are best."""
    two = edited("second_set")
    other = project.draw(tmp_path / "other", 12, 7)
    two.result("--second-data", other, epochs=2)
    table = rows(two.out / "whole")
    best = two.state("whole/best.pt")
    assert best["best"] == max(float(row["top1"]) for row in table)
    row = table[best["epoch"] - 1]
    found = two.evaluate("--data", other)
    found.pop("ece")  # of --eval-only alone
    second = {name: float(row[f"second_{name}"]) for name in found}
    assert found == pytest.approx(second, rel=1e-9)


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
def test_another_metric(project: Project, edited: Callable[[str], Edited]) -> None:
    mine = edited("metric")
    name = {TASKS[0]: "f1", TASKS[1]: "iou_crack"}[project.task]
    found = mine.result(epochs=2)
    scores = [float(row[name]) for row in rows(mine.out / "whole")]
    best = mine.state("whole/best.pt")
    assert best["best_of"].startswith(f"{name} on ")
    assert best["best"] == max(scores)
    assert best["epoch"] == 1 + scores.index(max(scores))
    assert found[name] == pytest.approx(max(scores))


@pytest.mark.parametrize("project", TASKS[1:], indirect=True)
def test_metrics_for_thin_objects(edited: Callable[[str], Edited]) -> None:
    """They are what their definition says, of the same bits on 1, 2 and 3 ranks."""
    thin = edited("thin")
    thin.run("whole").ok()
    best = thin.state("whole/best.pt")
    json_line = ("--eval-only", "--json")
    said = [thin.run("whole", *json_line, ranks=n).ok().out for n in (1, 2, 3)]
    one, two, three = [json.loads(text.splitlines()[-1]) for text in said]
    names = ["miou_foreground", *(f"biou_{name}" for name in best["classes"])]
    for name in names:
        assert one[name] == two[name] == three[name], name
    foreground = [one[f"iou_{name}"] for name in best["classes"][1:]]
    known = [share for share in foreground if share is not None]
    assert one["miou_foreground"] == pytest.approx(sum(known) / len(known))
    # a wrong guess here lies in the background
    assert one["miou_foreground"] < one["miou"]

    def compare() -> None:
        import model

        draw = np.random.default_rng(0)
        blocks = draw.integers(0, 4, (2, 8, 10))
        labels = blocks.repeat(20, axis=1).repeat(20, axis=2)
        labels[:, :15, :40] = model.VOID
        scores = draw.random((2, 4, 8, 10), np.float32)
        scores = scores.repeat(20, axis=2).repeat(20, axis=3)
        logits = np.roll(scores, (3, 7), axis=(2, 3))
        metric = model.BoundaryIoU(4)
        for image in range(2):
            part = slice(image, image + 1)
            metric.update(
                torch.from_numpy(logits[part]), torch.from_numpy(labels[part])
            )
        both = labels, np.where(labels == model.VOID, model.VOID, logits.argmax(1))
        d = 5  # 2 % of the diagonal, 256 pixels
        near = []
        for numbers in both:
            framed = np.pad(numbers, ((0, 0), (d, d), (d, d)), constant_values=-1)
            window = (2 * d + 1, 2 * d + 1)
            around = np.lib.stride_tricks.sliding_window_view(framed, window, (1, 2))
            near.append((around != numbers[..., None, None]).any((3, 4)))
        for number in range(4):
            label, guess = [
                (numbers == number) & is_near
                for numbers, is_near in zip(both, near, strict=True)
            ]
            expected = (label & guess).sum() / (label | guess).sum()
            assert 0.01 < expected < 0.5
            assert float(metric.compute()[number]) == pytest.approx(expected)

    thin.project.here(compare).ok()


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
def test_training_accuracy(project: Project, edited: Callable[[str], Edited]) -> None:
    """It is of all ranks and steps, also of those before a resume."""
    counted = edited("accuracy")
    counted.result(epochs=2)
    name = {TASKS[0]: "train_top1", TASKS[1]: "train_accuracy"}[project.task]
    shares = [float(row[name]) for row in rows(counted.out / "whole")]
    assert 0 < sum(shares) < 2
    if project.task == TASKS[0]:
        right = [share * 24 for share in shares]  # of three steps of eight images
        assert right == pytest.approx([round(number) for number in right])


def test_a_counter(edited: Callable[[str], Edited]) -> None:
    """It ends the run after five epochs that are no better, also if it has been resumed."""
    counter = edited("counter")
    main = counter.folder / "main.py"
    # that no epoch is lower by
    main.write_text(main.read_text().replace("lowest - 0.001", "lowest - 99"))
    words = ["--epochs", 9, "--save-every", 2]
    counter.run("whole", words).ok()
    assert len(rows(counter.out / "whole")) == 6
    counter.go_back()
    for _ in range(2):  # the second time there is nothing left to do
        counter.run("resumed", words).ok()
        assert digest(counter.out / "whole") == digest(counter.out / "resumed")


@pytest.mark.parametrize("project", TASKS[:1], indirect=True)
def test_epochs_between_evaluations(edited: Callable[[str], Edited]) -> None:
    """Of six the fifth and the last are evaluated."""
    seldom = edited("seldom")
    seldom.result(epochs=6)
    scores = [row["val_loss"] for row in rows(seldom.out / "whole")]
    assert [number for number, score in enumerate(scores, 1) if score] == [5, 6]


@pytest.mark.parametrize("project", TASKS[:1], indirect=True)
def test_steps_that_are_not_finite(edited: Callable[[str], Edited]) -> None:
    """They change no weight, and are not in the mean loss."""
    skipping = edited("not_finite")
    main = skipping.folder / "main.py"
    mean = "world_size / count"
    bad = f"{mean} * (math.inf if step == 1 else 1)"
    main.write_text(main.read_text().replace(f"{mean}\n", f"{bad}\n"))
    skipping.result()
    (row,) = rows(skipping.out / "whole")
    assert 0 < float(row["train_loss"]) < 99


@pytest.mark.parametrize("project", TASKS[:1], indirect=True)
def test_regression(edited: Callable[[str], Edited]) -> None:
    numbers = edited("regression")
    assert numbers.result()["mae"] > 0
    out = numbers.out / "drawn"
    numbers.project.train(numbers.data, out, on=1, draws=True).ok()
    assert (out / "examples.png").exists()


def test_a_flag(edited: Callable[[str], Edited]) -> None:
    """A change of it is said in a line."""
    newer = edited("flag")
    newer.result()
    said = newer.run("whole", "--epochs", 2, "--beta2", 0.9).ok().out
    assert "--beta2 0.9 (was 0.999)" in said
    assert newer.state()["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.9)


def test_frozen_layers(edited: Callable[[str], Edited]) -> None:
    """BatchNorm is as it was at the start, even if the backbone was frozen, too."""
    some = edited("frozen")
    some.result("--freeze-backbone", 1)
    model = some.state()["model"]
    ends = ".running_mean"
    layers = [name.removesuffix(ends) for name in model if name.endswith(ends)]
    assert len(layers) > 9
    for layer in layers:
        assert model[f"{layer}.weight"].eq(1).all()
        assert model[f"{layer}{ends}"].eq(0).all()


@pytest.mark.soak
@pytest.mark.parametrize("project", TASKS, indirect=True)
def test_lora(project: Project, edited: Callable[[str], Edited]) -> None:
    """Adapters and head learn, and nothing else; what was learnt is exported."""
    importlib.import_module("peft")  # once, for all forks
    tuned = edited("lora")
    tuned.result()
    now = tuned.state()["model"]
    before = tuned.state("whole/last-1.pt")["model"]
    changed = {name for name in now if not torch.equal(now[name], before[name])}
    head = "fc." if project.task == TASKS[0] else "decoder.", "segmentation_head."
    assert {"lora_" in name or name.startswith(head) for name in changed} == {True}
    learn = tuned.state()["optimizer"]["state"].keys()
    assert {"lora_" in name for name in learn} == {True, False}
    if project.task == TASKS[1]:
        return  # as much again, and no other code
    words = ["--checkpoint", tuned.out / "whole/best.pt", "--output", tuned.out]
    tuned.project.run(words, script="ddpkit export", on=1).ok()
    assert (tuned.out / "model.onnx").exists()


def test_heatmap(
    project: Project, trained: Path, edited: Callable[[str], Edited]
) -> None:
    """Where a network averages its last maps, they show what its last layer makes of each place."""
    seen = edited("heatmap")
    best = trained / "best.pt"
    for each in project, seen.project:
        words = [seen.data / "val", "--checkpoint", best]
        words += ["--output", seen.out / each.folder.name]
        each.run(words, script="predict.py", on=1).ok()
    folders = sorted(seen.out.iterdir())
    table = folders[0] / "predictions.csv"
    same = folders[1] / "predictions.csv"
    assert table.read_text() == same.read_text()
    names = [path.stem for path in sorted(seen.data.glob("val/*/*.jpg"))]
    found = {path.name for path in (table.parent / "heatmaps").iterdir()}
    assert found == {f"{number}_{name}.png" for number, name in enumerate(names, 1)}

    def compare() -> None:
        import predict
        from ddpkit.vision.predicting import open_model

        net, _, args, _ = open_model(
            best, predict.build_model, predict.parse_args, "cpu"
        )
        layers = list(net.children())
        head = layers.pop()
        images = torch.rand(3, 3, 64, 96) * 4 - 2
        logits, heat = predict.explain(net, images.clone(), args)
        with torch.inference_mode():
            maps = torch.nn.Sequential(*layers)(images)
            assert torch.allclose(logits, head(maps.mean((2, 3))), atol=1e-5)
            weights = head.weight[logits.argmax(1)]
            own = torch.einsum("nkhw,nk->nhw", maps, weights).relu().unsqueeze(1)
            own = torch.nn.functional.interpolate(
                own, (64, 96), mode="bilinear"
            ).squeeze(1)
        assert torch.allclose(heat, own / own.amax((1, 2), keepdim=True), atol=1e-4)

    seen.project.here(compare).ok()


def test_weights_that_some_steps_leave_out(edited: Callable[[str], Edited]) -> None:
    """Each rank skips a layer in other steps."""
    edited("unused").result("--accumulate", 1, "--freeze-backbone", 1, epochs=2)
