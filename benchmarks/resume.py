"""Who resumes exactly: killed within an epoch, started again, compared with an undisturbed run.

Each library trains the same small network with dropout on 64 samples with random noise, 3 epochs of
16 batches. It saves after each fifth batch, or, as in torch's own examples, after each epoch; it is
killed after batch 5 of epoch 2, started again in a new process, and loads what its documentation
says. All run on one CPU process. What a library does not offer, such as skipping batches in Fabric,
is written as its users do. The table says

batches    how many batches after the resume have the same samples as without an interruption
twice      samples of the interrupted epoch that changed the weights twice
never      and those that never did
weights    whether the last weights are identical
"""

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from common import machine, markdown
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 64
BATCH = 4
EPOCHS = 3
KILLED = (1, 5)  # epoch from 0, batches done of it


class Noisy(Dataset):
    """Samples with random numbers of their own, as augmentation has them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return torch.randn(8) + index % 4, index % 4, index


class Training:
    """What all libraries share: data, network, and a record of what was trained on."""

    def __init__(self, folder: Path, is_killed: bool) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.is_killed = is_killed
        self.loader = DataLoader(Noisy(), BATCH, shuffle=True)
        layers = nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
        self.model: nn.Module = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)

    def step(self, batch: list[Tensor], backward: Callable[[Tensor], None]) -> None:
        inputs, targets, numbers = batch
        backward(nn.functional.cross_entropy(self.model(inputs), targets))
        self.optimizer.step()
        self.optimizer.zero_grad()
        with open(self.folder / "batches", "a") as file:
            print(json.dumps(numbers.tolist()), file=file)

    def may_be_killed(self, epoch: int, done: int) -> None:
        if self.is_killed and (epoch, done) == KILLED:
            os._exit(1)


def plain_torch(training: Training) -> None:
    """As torch's ImageNet example: weights, optimizer and epoch, after each epoch."""
    path = training.folder / "checkpoint.pt"
    start = 0
    if path.exists():
        saved = torch.load(path)
        start = saved["epoch"]
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(start, EPOCHS):
        for done, batch in enumerate(training.loader, 1):
            training.step(batch, Tensor.backward)
            training.may_be_killed(epoch, done)
        state = {"epoch": epoch + 1, "model": training.model.state_dict()}
        torch.save(state | {"optimizer": training.optimizer.state_dict()}, path)


def accelerate(training: Training, **config: bool) -> None:
    """As its guide on checkpoints: save_state, load_state, skip_first_batches."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(**config)
    )
    training.model, training.optimizer, loader = accelerator.prepare(
        training.model, training.optimizer, training.loader
    )
    place = training.folder / "place"
    first, skipped = 0, 0
    if place.exists():
        first, skipped = json.loads(place.read_text())
        accelerator.load_state(training.folder / "state")
    for epoch in range(first, EPOCHS):
        batches = loader
        if skipped and epoch == first:
            batches = accelerator.skip_first_batches(loader, skipped)
        else:
            skipped = 0
        if hasattr(batches, "set_epoch"):
            batches.set_epoch(epoch)
        for done, batch in enumerate(batches, skipped + 1):
            training.step(batch, accelerator.backward)
            if done % 5 == 0:
                accelerator.save_state(training.folder / "state")
                place.write_text(json.dumps([epoch, done]))
            training.may_be_killed(epoch, done)


def accelerate_seedable(training: Training) -> None:
    accelerate(training, use_seedable_sampler=True)


def fabric(training: Training) -> None:
    """fabric.save and fabric.load; batches are skipped by islice."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0, verbose=False)
    loader = fabric.setup_dataloaders(training.loader)
    training.model, training.optimizer = fabric.setup(
        training.model, training.optimizer
    )
    state = {"model": training.model, "optimizer": training.optimizer}
    state |= {"epoch": 0, "done": 0}
    path = training.folder / "checkpoint.ckpt"
    if path.exists():
        fabric.load(path, state)
    skipped = state["done"]
    for epoch in range(state["epoch"], EPOCHS):
        batches = itertools.islice(loader, skipped, None)
        for done, batch in enumerate(batches, skipped + 1):
            training.step(batch, fabric.backward)
            if done % 5 == 0:
                fabric.save(path, state | {"epoch": epoch, "done": done})
            training.may_be_killed(epoch, done)
        skipped = 0


def ddpkit(training: Training) -> None:
    import ddpkit

    checkpoints = ddpkit.Checkpoints(
        training.folder / "run",
        save_every=5,
        model=training.model,
        optimizer=training.optimizer,
    )
    for epoch in checkpoints.epochs(EPOCHS):
        batches = checkpoints.steps(training.loader, training.model)
        for done, batch in enumerate(batches, checkpoints.done + 1):
            training.step(batch, Tensor.backward)
            training.may_be_killed(epoch, done)


CASES: dict[str, tuple[str, Callable[[Training], None]]] = {
    "plain torch": ("torch", plain_torch),
    "accelerate": ("accelerate", accelerate),
    "accelerate, use_seedable_sampler": ("accelerate", accelerate_seedable),
    "Fabric": ("lightning_fabric", fabric),
    "ddpkit.Checkpoints": ("torch", ddpkit),
}


def train(name: str, folder: Path, is_killed: bool) -> None:
    training = Training(folder, is_killed)
    CASES[name][1](training)
    torch.save(training.model.state_dict(), folder / "weights.pt")


def run(name: str, folder: Path, *words: str) -> tuple[int, str]:
    """Train in a process of its own; return its status, and what it says on stderr."""
    command = [sys.executable, __file__, "--case", name, "--folder", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *words], env=env, capture_output=True, text=True)
    return done.returncode, done.stderr


def start(name: str, folder: Path, *words: str) -> list[list[int]]:
    """Return the batches of all starts in this folder, of which this is one."""
    folder.mkdir(exist_ok=True)
    status, said = run(name, folder, *words)
    if status != bool(words):
        raise SystemExit(f"{name}: status {status}\n{said}")
    lines = (folder / "batches").read_text().splitlines()
    return [json.loads(line) for line in lines]


def measure(name: str, folder: Path) -> tuple[str, ...]:
    """Return the columns of a library's row."""
    whole = start(name, folder / "whole")
    before = start(name, folder / "killed", "--kill")
    after = start(name, folder / "killed")[len(before) :]
    resumed = len(whole) - len(after)  # what was trained since the checkpoint is lost
    same = sum(map(list.__eq__, after, whole[resumed:]))
    steps = SAMPLES // BATCH
    interrupted = slice(KILLED[0] * steps, (KILLED[0] + 1) * steps)
    batches = (before[:resumed] + after)[interrupted]
    seen = Counter(number for batch in batches for number in batch)
    twice = sum(count > 1 for count in seen.values())
    states = [torch.load(folder / run / "weights.pt") for run in ("whole", "killed")]
    pairs = zip(*(state.values() for state in states), strict=True)
    is_identical = all(torch.equal(*pair) for pair in pairs)
    return (
        name,
        f"{same} of {len(after)}",
        f"{twice} of {SAMPLES}",
        f"{SAMPLES - len(seen)} of {SAMPLES}",
        "identical" if is_identical else "differ",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="libraries; default: all")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        train(args.case, args.folder, args.kill)
        return
    print(machine())
    rows = [("library", "batches", "twice", "never", "weights")]
    for name in args.names or CASES:
        if not importlib.util.find_spec(CASES[name][0]):
            rows.append((name, "not installed", "", "", ""))
            continue
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            rows.append(measure(name, Path(folder)))
    markdown(rows)


if __name__ == "__main__":
    main()
