"""The recipes of EDITS.md: each diff applies, is clean, resumes to the bit and works."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from digest import digest
from generated import TASKS, Done, Project, after_step, both_tasks, rows

# The section of each recipe. main.py, flags.py's lines and recipe.py are the same in both tasks.
TITLES = (
    "To train on one of torchvision's data sets",
    "To train on a data set of Hugging Face",
    "To use a DataLoader of your own",
    "To have three parts in a sample",
    "To add a network of your own with an auxiliary loss",
    "To add a teacher (distillation)",
    "To add a discriminator with its own optimizer",
    "To add a second validation set",
    "To choose best.pt by another metric",
    "To augment with another library",
    "To add a flag",
    "To keep layers frozen",
    "To let some steps leave weights out",
    "To add a tracker (MLflow)",
)
TORCHVISION, HUGGING_FACE, LOADER, PARTS, NETWORK, TEACHER, ADVERSARY = TITLES[:7]
SECOND, BEST, LIBRARY, FLAG, FROZEN, UNUSED, TRACKER = TITLES[7:]
ALBUMENTATIONS = """
import numpy as np

CLAHE = GaussNoise = str


class Compose:
    def __init__(self, transforms):
        self.random = np.random.default_rng()

    def set_random_seed(self, seed):
        self.random = np.random.default_rng(seed)

    def __call__(self, image):
        return {"image": image // 2 + self.random.integers(0, 128, image.shape, np.uint8)}
"""
MLFLOW = """
from types import SimpleNamespace


def note(*words):
    with open(__file__ + ".txt", "a") as file:
        print(*words, file=file)


def start_run(run_id):
    note("start", run_id)
    return SimpleNamespace(info=SimpleNamespace(run_id="a1b2"))


def log_params(params):
    note("params", params["batch_size"])


def log_metrics(row, step):
    note("epoch", step, row["top1"])
"""
SKIPPING = """
import torch


class Skipping(nn.Module):
    def __init__(self, head: nn.Module, size: int) -> None:
        super().__init__()
        self.spare, self.head = nn.Linear(size, size), head

    def forward(self, features: Tensor) -> Tensor:
        logits = self.head(features)
        skips = self.training and torch.rand(()) < 0.5
        return logits if skips else logits + self.spare(logits)


build_whole = build_model


def build_model(args, classes, channels=3, weights=None):
    model = build_whole(args, classes, channels, weights)
    model.fc = Skipping(model.fc, len(classes))
    return model
"""

# In place of what would be downloaded; appended to dataset.py.
OF_TORCHVISION = """

class Downloaded(torch.utils.data.Dataset):
    def __init__(self, root, split="", train=True, transform=None, transforms=None, **_):
        from PIL import Image

        self.apply, self.image = transform or transforms, Image
        self.total, self.classes = (26 if train and split != "test" else 6), list("abcdef")

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        image = self.image.new("RGB", (48, 40), (index * 9, 99, 9))
        if {is_segmentation}:
            return self.apply(image, self.image.new("L", (48, 40), 1 + index % 3))
        return self.apply(image), index % 6


torchvision.datasets.CIFAR10 = torchvision.datasets.OxfordIIITPet = Downloaded
"""
OF_HUGGING_FACE = """
from types import SimpleNamespace

from PIL import Image


class Part:
    features = {"label": SimpleNamespace(names=list("abcdef"))}

    def __init__(self, total):
        self.total = total

    def __len__(self):
        return self.total

    def with_transform(self, transform):
        self.transform = transform
        return self

    def __getitem__(self, index):
        image = Image.new("RGB", (48, 40), (index * 9, 99, 9))
        batch = {"id": [index], "image": [image], "label": [index % 6]}
        batch["mask"] = [Image.new("L", (48, 40), index % 2)]
        return {"id": index, **{name: part[0] for name, part in self.transform(batch).items()}}


def load_dataset(name):
    return {"train": Part(26), "test": Part(6)}
"""
STREAM = """

class Stream(torch.utils.data.IterableDataset):
    at = 0

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, epoch):
        self.at = epoch

    def __iter__(self):
        for _ in range(len(self)):
            self.at += 1
            yield self.dataset[self.at % len(self)]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


build_files = build_datasets


def build_datasets(args):
    train, val, classes = build_files(args)
    train.transform = val.transform
    return Stream(train), val, classes
"""


def read_diffs(project: Project) -> dict[str, str]:
    """The diff of each section of EDITS.md that has one."""
    sections = re.split(r"^## (.*)$", (project.folder / "EDITS.md").read_text(), flags=re.M)[1:]
    blocks = [re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S) for text in sections[1::2]]
    assert all(len(found) == 1 for found in blocks)
    return {title: found[0] for title, found in zip(sections[::2], blocks, strict=True)}


def git_apply(diff: str, folder: Path) -> str:
    """Apply a diff to a folder, or change nothing and return why."""
    command = ["git", "apply", "-"]
    done = subprocess.run(command, cwd=folder, input=diff, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def apply(project: Project, title: str, folder: Path) -> Project:
    """A copy of the project with the recipe `title` of its EDITS.md."""
    copy = project.copy(folder)
    fault = git_apply(read_diffs(project)[title], copy.folder)
    assert not fault, f"EDITS.md, {title}: does not apply\n{fault}"
    return copy


class Edited:
    """Runs of a project with edited files."""

    def __init__(self, project: Project, data: Path, folder: Path, title: str) -> None:
        self.data, self.out = data, folder / "out"
        self.project = apply(project, title, folder / "edited")
        self.folder = self.project.folder

    def run(self, name: str, *more: object, ranks: int = 2, stop: int = 0) -> Done:
        kill = after_step(stop, lambda: os.kill(os.getpid(), signal.SIGKILL)) if stop else None
        return self.project.train(self.data, self.out / name, *more, on=ranks, patch=kill)

    def result(self, *more: object, epochs: int = 1) -> str:
        """The digest of a run; the same of one that was killed in its last epoch."""
        every, stop = (2, 3) if epochs == 1 else (4, 5)  # of three steps an epoch
        words = "--epochs", epochs, "--save-every", every, *more
        self.run("whole", *words).ok()
        assert self.run("killed", *words, stop=stop).status == -9
        assert " of the next" in self.run("killed", *words).ok().out
        assert digest(self.out / "whole") == digest(self.out / "killed")
        return digest(self.out / "whole")

    def use(self, *more: object) -> dict[str, float]:
        """Evaluate the best checkpoint and predict with it; return the former's results."""
        said = self.run("whole", "--eval-only", *more, ranks=1).ok().out
        words = ["--checkpoint", self.out / "whole/best.pt", "--output", self.out / "predictions"]
        images = sorted(self.data.glob("val/*/*.jpg"))[:2]
        self.project.run(*images, *words, script="predict.py", on=1).ok()
        return json.loads(said.splitlines()[-1])

    def state(self, name: str = "whole/last.pt") -> dict:
        return torch.load(self.out / name, weights_only=True)


@pytest.fixture
def edited(project: Project, few: Path, tmp_path: Path) -> Callable[[str], Edited]:
    return lambda title: Edited(project, few, tmp_path, title)


@both_tasks
def test_diffs_apply_and_are_clean(project: Project, shared: Path, tmp_path: Path) -> None:
    """Each alone by ruff; by mypy, which takes longer, in as few copies as the diffs fit into."""
    diffs = read_diffs(project)
    assert [*diffs] == [*TITLES]
    ruff = [sys.executable, "-m", "ruff"]
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", shared / "mypy"]
    wrong = []
    together: dict[Path, list[str]] = {}

    def check(copy: Path, title: str, *command: object) -> None:
        done = subprocess.run([*command, "."], cwd=copy, capture_output=True, text=True)
        wrong.extend([f"{title}: {done.stdout}"] if done.returncode else [])

    for number, (title, diff) in enumerate(diffs.items()):
        try:
            copy = apply(project, title, tmp_path / str(number)).folder
        except AssertionError as error:
            wrong.append(str(error))
            continue
        check(copy, title, *ruff, "check")
        check(copy, title, *ruff, "format", "--check")
        is_of_the_task = "main.py" not in diff and "recipe.py" not in diff
        if project.task == TASKS[0] or is_of_the_task:
            fits = (folder for folder in together if not git_apply(diff, folder))
            together.setdefault(next(fits, copy), []).append(title)
    for folder, titles in together.items():
        check(folder, ", ".join(titles), *mypy)
    assert not wrong, "\n".join(wrong)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


@both_tasks
def test_torchvisions_set(project: Project, edited: Callable[[str], Edited]) -> None:
    """Images of PIL, labels and masks, the network's sizes: as the loaders want them."""
    own = edited(TORCHVISION)
    code = OF_TORCHVISION.replace("{is_segmentation}", str(project.task == "segmentation"))
    append(own.folder / "dataset.py", code)
    own.result()
    assert own.state()["images"] == 26
    assert "miou" in own.use() or project.task == "classification"


@both_tasks
def test_hugging_faces_set(project: Project, edited: Callable[[str], Edited]) -> None:
    """Samples are dicts, in another order than (image, target, ...)."""
    own = edited(HUGGING_FACE)
    (own.folder / "datasets.py").write_text(OF_HUGGING_FACE)
    own.result()
    own.use()


def test_a_plain_loader(edited: Callable[[str], Edited]) -> None:
    """It says what it gives up; the ranks share its batches; a stopped epoch starts over."""
    own = edited(LOADER)
    said = own.run("whole", "--epochs", 2).ok().out
    assert "resumes from its start, not to the bit" in said
    assert own.state()["step"] == 6
    assert own.run("killed", "--save-every", 2, "--epochs", 2, stop=5).status == -9
    said = own.run("killed", "--epochs", 2).ok().out
    assert "cannot continue in mid-epoch" in said
    assert own.state("killed/last.pt")["epoch"] == 2
    own.use()
    sampler = "torch.utils.data.distributed.DistributedSampler(train_set)"
    main = own.folder / "main.py"
    text = main.read_text().replace("shuffle=True", f"sampler={sampler}")
    main.write_text(text.replace(" // torch.distributed.get_world_size()", ""))
    own.run("distributed", "--epochs", 2).ok()
    assert own.state("distributed/last.pt")["step"] == 6
    val = "batch_sampler=ddpkit.ValSampler(val_set, args.batch_size)"
    text = main.read_text().replace("seeded,\n", "val_set,\n")
    assert val in text
    plain = text.replace(val, "batch_size=4").replace("collate_fn=ddpkit.Collate(),\n", "\n")
    main.write_text(plain)
    alike = own.run("plain", "--epochs", 2).ok() and rows(own.out / "plain")[0]
    first = rows(own.out / "distributed")[0]
    assert float(alike["val_loss"]) == pytest.approx(float(first["val_loss"]))
    repeats = "sampler=torch.utils.data.distributed.DistributedSampler(val_set), batch_size=4"
    main.write_text(plain.replace("batch_size=4", repeats))
    own.run("repeats", "--epochs", 1).refused("loading.numbered", "DistributedSampler")


def test_a_stream(edited: Callable[[str], Edited]) -> None:
    """With a state_dict an epoch resumes to the bit."""
    own = edited(LOADER)
    append(own.folder / "dataset.py", STREAM)
    main = own.folder / "main.py"
    main.write_text(main.read_text().replace("shuffle=True, ", ""))
    own.result()


@both_tasks
def test_three_parts(edited: Callable[[str], Edited]) -> None:
    own = edited(PARTS)
    own.result()
    own.use()


@both_tasks
def test_network_of_your_own(edited: Callable[[str], Edited]) -> None:
    """The auxiliary head learns; the network returns the logits alone in evaluation."""
    mine = edited(NETWORK)
    mine.result("--arch", "mine")
    now, before = (mine.state(f"whole/{name}.pt")["model"] for name in ("last", "last-1"))
    assert not torch.equal(now["auxiliary.bias"], before["auxiliary.bias"])
    mine.use("--arch", "mine")


def test_teacher(edited: Callable[[str], Edited]) -> None:
    """It changes what is learned and is in no checkpoint."""
    pupil = edited(TEACHER)
    pupil.run("alone").ok()
    teacher = pupil.out / "alone/best.pt"
    assert pupil.result("--teacher", teacher) != digest(pupil.out / "alone")
    assert pupil.state().keys() == pupil.state("alone/last.pt").keys()
    pupil.use()


def test_discriminator(project: Project, few: Path, edited: Callable[[str], Edited]) -> None:
    """Both networks learn, the first one something else than without; both are compared."""
    both = edited(ADVERSARY)
    both.result("--accumulate", 1)
    now, before = (both.state(f"whole/{name}.pt") for name in ("last", "last-1"))
    assert not torch.equal(now["adversary"]["0.bias"], before["adversary"]["0.bias"])
    assert now["adversary_optimizer"]["state"]["adversary.0.weight"]["step"] == 3
    project.train(few, both.out / "alone").ok()
    alone = both.state("alone/last.pt")["model"]
    assert any(not torch.equal(now["model"][name], alone[name]) for name in alone)
    both.use()
    file = both.folder / "adversary.py"
    file.write_text(file.read_text().replace("self.ddp_network(", "self.network("))
    both.run("bypassed").refused("replicas.check_same", "0.weight")


def test_second_validation_set(
    project: Project, tmp_path: Path, edited: Callable[[str], Edited]
) -> None:
    """Its columns are what --eval-only finds; the first set decides which weights are best."""
    two, other = edited(SECOND), project.draw(tmp_path / "other", 12, 7)
    two.result("--second-data", other, epochs=2)
    table = rows(two.out / "whole")
    best = two.state("whole/best.pt")
    assert best["best"] == max(float(row["top1"]) for row in table)
    row = table[best["epoch"] - 1]
    found = two.use("--data", other)
    assert found == pytest.approx({name: float(row[f"second_{name}"]) for name in found}, rel=1e-9)
    assert found["top1"] != best["best"]
    for part in "train", "val":
        shutil.rmtree(other / part / "waves")
    two.run("refused", "--second-data", other).refused("", "other: its classes")


@both_tasks
def test_another_metric(project: Project, edited: Callable[[str], Edited]) -> None:
    mine, name = edited(BEST), {"classification": "f1", "segmentation": "iou_crack"}[project.task]
    if project.task == "classification":
        mine.result(epochs=2)
    else:
        mine.run("whole", "--epochs", 2, ranks=1).ok()
    scores = [float(row[name]) for row in rows(mine.out / "whole")]
    best = mine.state("whole/best.pt")
    assert best["best_of"].startswith(f"{name} on ")
    assert (best["best"], best["epoch"]) == (max(scores), 1 + scores.index(max(scores)))
    assert mine.use()[name] == pytest.approx(max(scores))


def test_augmentation_by_a_library(edited: Callable[[str], Edited]) -> None:
    """With a generator of its own, as albumentations has."""
    noisy = edited(LIBRARY)
    (noisy.folder / "albumentations.py").write_text(ALBUMENTATIONS)
    noisy.result()
    noisy.use()


def test_older_checkpoint(project: Project, few: Path, edited: Callable[[str], Edited]) -> None:
    """It resumes with the default of the flag."""
    newer = edited(FLAG)
    words = "--epochs", 2
    project.train(few, newer.out / "whole", *words).ok()
    kill = after_step(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    killed = newer.out / "killed"
    assert project.train(few, killed, "--save-every", 4, *words, patch=kill).status == -9
    path = newer.out / "killed" / "last.pt"
    state = torch.load(path, weights_only=True)
    for flag in "optimizer", "ema", "patience":
        del state["args"][flag]
    torch.save(state, path)
    assert "--beta2" not in newer.run("killed", *words).ok().out
    assert digest(newer.out / "killed") == digest(newer.out / "whole")
    said = newer.run("killed", "--epochs", 3, "--beta2", 0.9).ok().out
    assert "--beta2 0.9 (was 0.999)" in said
    assert newer.state("killed/last.pt")["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.9)
    newer.use()


def test_frozen_layers(edited: Callable[[str], Edited]) -> None:
    """BatchNorm is as it was at the start, even if the backbone was frozen, too."""
    some = edited(FROZEN)
    some.result("--freeze-backbone", 1)
    model = some.state()["model"]
    for name in (name for name in model if name.endswith("running_mean")):
        layer = name.rpartition(".")[0]
        assert model[f"{layer}.weight"].eq(1).all()
        assert model[name].eq(0).all()
    some.use()


def test_weights_that_some_steps_leave_out(edited: Callable[[str], Edited]) -> None:
    """Each rank skips a layer in other steps; without the recipe that is refused."""
    skipping = edited(UNUSED)
    with open(skipping.folder / "model.py", "a") as file:
        file.write(SKIPPING)
    skipping.result("--accumulate", 1, "--freeze-backbone", 1, epochs=2)
    now, before = (skipping.state(f"whole/{name}.pt")["model"] for name in ("last", "last-1"))
    name = "fc.spare.bias"
    assert not torch.equal(now[name], before[name])
    skipping.use()
    main = skipping.folder / "main.py"
    main.write_text(main.read_text().replace(", find_unused_parameters=True", ""))
    done = skipping.run("refused", "--dist-timeout", 20)
    done.refused("failures.unused", "fc.spare", "find_unused_parameters=True")


def test_tracker(edited: Callable[[str], Edited]) -> None:
    """It gets each row once; the resumed run continues the tracker's."""
    tracked = edited(TRACKER)
    (tracked.folder / "mlflow.py").write_text(MLFLOW)
    tracked.result(epochs=2)
    lines = (tracked.folder / "mlflow.py.txt").read_text().splitlines()
    whole, killed = ([row["top1"] for row in rows(tracked.out / n)] for n in ("whole", "killed"))
    assert lines == [
        *("start None", "params 4", f"epoch 1 {whole[0]}", f"epoch 2 {whole[1]}"),
        *("start None", "params 4", f"epoch 1 {killed[0]}", "start a1b2", f"epoch 2 {killed[1]}"),
    ]
    tracked.use()
