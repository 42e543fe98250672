"""Scripts of other people, in foreign/: with their diffs they stop and resume exactly."""

import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
from generated import ROOT, Done, left, refusal, wait_for
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

import ddpkit
from ddpkit.data import samples
from ddpkit.ranks import distributed
from ddpkit.run import resuming

FOREIGN = ROOT / "tests" / "foreign"
NAMES = sorted(path.stem for path in FOREIGN.glob("*.py"))
STEPS = {
    "accelerate_loop": 100,
    "early_stopping": 60,
    "fabric_loop": 64,
    "gan": 64,
    "images": 32,
    "iterations": 80,
    "stream": 60,
    "tokens": 60,
}
Start = Callable[..., Done]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start an edited script on two ranks in a folder; return what has become of it."""

    def act(
        name: str, folder_name: str, patch: ranks.Patch = int, of_ranks: int = 2
    ) -> Done:
        folder = tmp_path / folder_name
        folder.mkdir(exist_ok=True)
        script = folder / f"{name}.py"
        if not script.exists():
            shutil.copy(FOREIGN / f"{name}.py", folder)
            diff = FOREIGN / f"{name}.diff"
            subprocess.run(["git", "apply", diff], cwd=folder, check=True)

        def begin() -> None:
            # Neither that of the project is found, which other tests use.
            sys.path[:] = [place for place in sys.path if not has_main(place)]
            look_soon()
            patch()

        output = folder / "printed"
        for path in folder.glob("printed.*"):
            path.unlink()
        pids = ranks.start(of_ranks, str(script), [], output, folder, begin)
        statuses = ranks.wait(pids)
        out, err = ranks.said(output)
        return Done(statuses, out, err, [])

    return act


def look_soon() -> None:
    """A plain loader worker looks only every 5 s whether its rank is there."""
    worker.MP_STATUS_CHECK_INTERVAL = 0.5


def has_main(place: str) -> bool:
    return Path(place, "main.py").exists()


def at_step(step: int, signum: int, *which: int) -> ranks.Patch:
    """Have these ranks send themselves a signal at the end of a step."""

    def patch() -> None:
        end_step = resuming.end_step
        count = 0

        def patched() -> None:
            nonlocal count
            count += 1
            if count == step and int(os.environ["RANK"]) in which:
                os.kill(os.getpid(), signum)
            end_step()

        resuming.end_step = patched

    return patch


def ends(folder: Path) -> dict[str, int]:
    """A checksum of all that a run has saved, and of each file that the script itself has."""
    state = torch.load(folder / "run" / "last.pt", weights_only=True)
    kept = [state[name] for name in ("parts", "of_ranks", "epoch", "step")]
    found = {"last.pt": samples.checksum(kept)}
    for path in folder.glob("*.pt*"):
        found[path.name] = samples.checksum(torch.load(path, weights_only=True))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_script_of_ones_own(name: str, tmp_path: Path, start: Start) -> None:
    """At most 15 lines; stopped by signals and killed, within steps and between: the same bits."""
    diff = (FOREIGN / f"{name}.diff").read_text()
    assert len(re.findall(r"^[+-](?![+-])", diff, re.MULTILINE)) <= 15
    assert "warning" not in start(name, "whole").ok().out
    stop = random.Random(name).randrange(2, STEPS[name] - 22)
    done = start(name, "stopped", ranks.at_turn(stop, signal.SIGTERM, 1))
    assert done.statuses == [75, 75]
    assert re.search(r"SIGTERM: stopped and saved at epoch \d+, step \d+", done.out)
    # Then killed, at most at the end of the next epoch.
    done = start(name, "stopped", at_step(9, signal.SIGKILL, 0))
    assert done.statuses[0] == -9
    assert done.statuses[1]
    done = start(name, "stopped", ranks.at_turn(10, signal.SIGTERM, 0, 1))
    assert done.statuses == [75, 75]
    done = start(name, "stopped").ok()
    assert re.search(r"run/last.pt: \d+ epoch\(s\) done", done.out)
    assert ends(tmp_path / "whole") == ends(tmp_path / "stopped")
    state = torch.load(tmp_path / "whole" / "run" / "last.pt", weights_only=True)
    assert not re.search("Fabric|Accelerated", str(state["kinds"]))  # those of torch
    wait_for(lambda: not left(0), 30)  # plain loader workers of who was killed


@pytest.mark.parametrize("way", ["accumulated", "carried", "kept", "zipped", "saved"])
def test_ways_of_writing(way: str, tmp_path: Path) -> None:
    """Gradients added up over turns, kept workers, a generator of a sampler's own, two loaders.

    And saves within a step, and before the end of an epoch, after which it is killed.
    """
    script = tmp_path / "ways.py"
    script.write_text(WAYS)
    found = []
    for name, stops in ("whole", []), ("stopped", [6, 8]):
        folder = tmp_path / name
        folder.mkdir()
        for count, step in enumerate([*stops, None]):
            patch = at_step(step, signal.SIGTERM, 1) if step else look_soon
            if step and way == "saved":
                patch = killed_while_saving(count)
            output = folder / f"printed{count}"
            pids = ranks.start(2, str(script), [way], output, folder, patch)
            statuses = ranks.wait(pids)
            if step and way == "saved":
                assert -signal.SIGKILL in statuses
                continue
            assert statuses == ([75, 75] if step else [0, 0])
            out, err = ranks.said(output)
            assert not err
            assert "before saving is repeated" not in out
            if step and way in ("accumulated", "carried"):
                assert int(re.search(r"step (\d+); run the same", out)[1]) % 3 == 0
        found.append(ends(folder))
        lengths = {(folder / f"lengths{rank}").read_text() for rank in range(2)}
        assert len(lengths) == 1
        found.append(lengths)
    assert found[:2] == found[2:]
    wait_for(lambda: not left(0), 10)  # plain workers: a test's fork calls no atexit


def killed_while_saving(count: int) -> ranks.Patch:
    """Kill both ranks in the second epoch, after a save in a step, or after one of the best."""

    def patch() -> None:
        name = ("save", "save_best")[count]
        called = getattr(resuming.Checkpoints, name)

        def patched(self: ddpkit.Checkpoints, *words: float) -> object:
            result = called(self, *words)
            distributed.barrier()
            is_inside = self.phase is resuming.Phase.STEPS
            if self.epoch == 1 and (is_inside or count):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(resuming.Checkpoints, name, patched)

    return patch


WAYS = """
import random, sys
import numpy, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
import ddpkit

class Noisy(Dataset):
    def __len__(self):
        return 104

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randn(4, generator=generator) + 0.1 * torch.randn(4)
        return drawn + random.random() + numpy.random.rand(), drawn.sum()

class Drawn:
    def __init__(self):
        self.chance = numpy.random.default_rng(dist.get_rank())

    def __len__(self):
        return 13

    def __iter__(self):
        for _ in range(13):
            yield self.chance.integers(104, size=4).tolist()

way = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
data = Noisy()
if way in ("accumulated", "carried", "saved"):
    loader = ddpkit.train_loader(data, 4, workers=2)
else:
    how = {"batch_sampler": Drawn(), "persistent_workers": True}
    if way == "zipped":
        how = {"batch_size": 8, "shuffle": True, "drop_last": True}
    loader = DataLoader(data, num_workers=2, **how)
others = DataLoader(data, 4, shuffle=True)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
checkpoints = ddpkit.Checkpoints(
    "run", model=model, optimizer=optimizer, scheduler=scheduler
)
added_up = 3 if isinstance(loader.sampler, ddpkit.data.loading.TrainSampler) else 1
for epoch in checkpoints.epochs(3):
    batches = zip(loader, others) if way == "zipped" else loader
    first = checkpoints.done
    for number, batch in enumerate(checkpoints.steps(batches, model), first):
        (inputs, target), *more = batch if way == "zipped" else [batch]
        loss = (model(inputs)[:, 0] - target).square().mean()
        for (inputs, target), *_ in [more] * len(more):
            loss = loss + (model(inputs)[:, 0] - target).abs().mean()
        loss.backward()
        if way == "saved" and number == 4:
            checkpoints.save()
        is_last = way in ("accumulated", "saved") and number + 1 == len(loader)
        if (number + 1) % added_up == 0 or is_last:
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    if way == "saved":
        checkpoints.save_best(epoch)
    with open(f"lengths{dist.get_rank()}", "w") as file:
        file.write(str(len(loader)))
"""


def test_one_loop_in_an_epoch(tmp_path: Path) -> None:
    """Another one would go on where the first has ended."""

    def made(name: str) -> ddpkit.Checkpoints:
        return ddpkit.Checkpoints(tmp_path / name, net=torch.nn.Linear(2, 2))

    checkpoints = made("two")
    for _ in checkpoints.epochs(2):
        assert list(checkpoints.steps([1, 2])) == [1, 2]
        with refusal("resuming.in_loop", "itertools.chain"):
            list(checkpoints.steps([3, 4, 5]))
    checkpoints = made("inner")
    for _ in checkpoints.steps(range(2)):
        with refusal("resuming.in_loop"):
            list(checkpoints.steps(range(2)))
    with refusal("resuming.in_loop"):  # without epochs there is one in all
        list(checkpoints.steps(range(4)))
    checkpoints = made("left")
    for step in checkpoints.steps(range(4)):
        if step == 2:
            break
    assert list(checkpoints.steps(range(4))) == [2, 3]  # a cell of a notebook, again


def test_made_again_and_again(tmp_path: Path) -> None:
    """As a cell of a notebook is run: nothing holds the networks of before."""
    net = torch.nn.Linear(2, 2)
    known = weakref.ref(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=optimizer)
    for _ in checkpoints.steps(range(2)):
        net(torch.ones(2)).sum().backward()
        optimizer.step()
    del net, optimizer, checkpoints
    gc.collect()
    assert known() is None


LAST = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import ddpkit

dist.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
unused = torch.optim.SGD(net.parameters(), 0.1)
checkpoints = ddpkit.Checkpoints("run", net=net, optimizer=unused)
optimizer = torch.optim.Adam(net.parameters())
at = int(sys.argv[1])
for step in checkpoints.steps(range(20)):
    if dist.get_rank() and step == at:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    net(torch.ones(2)).sum().backward()
    dist.all_reduce(net.weight.grad)
    optimizer.step()
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), checkpoints.step)
"""


def test_a_signal_in_the_last_step(tmp_path: Path) -> None:
    """The script goes on to its end; before it, it stops, whichever optimizer takes the steps."""
    script = tmp_path / "script.py"
    script.write_text(LAST)
    for at, statuses in (5, [75, 75]), (19, [0, 0]):
        output = tmp_path / f"printed{at}"
        pids = ranks.start(2, str(script), [str(at)], output, tmp_path, int)
        assert ranks.wait(pids) == statuses
        assert not ranks.said(output)[1]
    out = ranks.said(output)[0]
    assert out.count("2.0 20\n") == 2
    assert "all steps are done; running the rest of the script" in out


@ranks.on_ranks(2)
def test_ranks_that_draw_for_themselves(tmp_path: Path) -> None:
    """Seeded with numbers of their own they go on with batches of their own."""

    def first(seed: int, generator: torch.Generator | None = None) -> list:
        torch.manual_seed(seed)
        loader = DataLoader(range(64), 4, shuffle=True, generator=generator)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        distributed.barrier()
        made = ddpkit.Checkpoints(folder)
        batch = next(iter(made.steps(loader)))
        return distributed.gather_objects(batch.tolist())

    own = torch.Generator().manual_seed(distributed.rank())
    assert len(set(map(str, first(0)))) == 1
    assert len(set(map(str, first(distributed.rank())))) == 2
    assert len(set(map(str, first(0, own)))) == 2


def test_parts_that_are_none(tmp_path: Path) -> None:
    """Told before anything is trained, with its name; and names that have changed."""
    net = torch.nn.Linear(2, 2)
    for part in 5, torch.Generator():
        with refusal("resuming.check_parts", "note", type(part).__name__):
            ddpkit.Checkpoints(tmp_path / "run", net=net, note=part)
    assert not (tmp_path / "run").exists()
    ddpkit.Checkpoints(tmp_path / "run", net=net, average=net).save()
    for parts in {"model": net, "average": net}, {"net": net, "ema": net}:
        with refusal("resuming.compare_names", "run/last.pt"):
            ddpkit.Checkpoints(tmp_path / "run", **parts)
    said: list[str] = []
    before, distributed.print0 = distributed.print0, said.append
    try:
        ddpkit.Checkpoints(tmp_path / "run", net=net)
    finally:
        distributed.print0 = before
    assert "average" in said[-1]


ENDS = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import ddpkit

data = TensorDataset(torch.randn(64, 4))
if sys.argv[1] == "ddpkit":
    loader = ddpkit.train_loader(data, 8, workers=2)
else:
    loader = DataLoader(data, 8, num_workers=2, persistent_workers=True)
checkpoints = ddpkit.Checkpoints("run", model=torch.nn.Linear(4, 1))
for epoch in checkpoints.epochs(2):
    for batch in checkpoints.steps(loader):
        pass
for batch in loader:
    pass
print("end")
"""


@pytest.mark.parametrize("whose", ["ddpkit", "torch"])
def test_workers_of_a_global_loader(whose: str, tmp_path: Path) -> None:
    """They end with the script, though they outlive SIGTERM."""
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    command = [sys.executable, script, whose]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    wait_for(lambda: not left(0), 10)


def test_other_ranks(start: Start) -> None:
    """Steps over a range go on; an epoch of a loader starts over, and says so."""
    for name, text in (
        ("tokens", ""),
        ("gan", "the number of ranks was 2: the interrupted epoch"),
    ):
        done = start(name, name, at_step(22, signal.SIGTERM, 0))
        assert done.statuses == [75, 75]
        done = start(name, name, of_ranks=3).ok()
        assert "steps of the next" in done.out
        assert text in done.out
        assert ("starts over" in done.out) == bool(text)


HANG = """
import torch.distributed, datetime, functools
join = torch.distributed.init_process_group
short = functools.partial(join, timeout=datetime.timedelta(seconds=4))
torch.distributed.init_process_group = short
"""


def test_a_hang_of_a_script(start: Start, tmp_path: Path) -> None:
    """A collective that one rank leaves out: where both are, and one line; then a fault."""
    folder = tmp_path / "hang"
    start("images", "hang", lambda: os._exit(0))  # only makes the folder
    script = folder / "images.py"
    code = script.read_text()
    line = "    dist.all_reduce(right)\n"
    assert code.count(line) == 1
    script.write_text(code.replace(line, f"    if dist.get_rank() == 0:\n    {line}"))
    done = start("images", "hang", lambda: exec(HANG, {}))
    assert done.statuses == [1, 1]
    collective = r"rank 0, .*at images.py:\d+: in collective \d+, all_reduce"
    assert re.search(collective, done.err)
    assert re.search(r"rank 1, .*at images.py:\d+", done.err)
    assert re.search(r"^error: rank \d timed out after 4 s", done.err, re.MULTILINE)
    fault = "    if dist.get_rank() == 1:\n        raise ddpkit.UserError('no such thing')\n"
    script.write_text(code.replace(line, fault + line))
    done = start("images", "hang")
    assert done.statuses == [2, 2]
    assert done.err.splitlines() == ["error: no such thing [images.evaluate]"]


def test_without_a_group(tmp_path: Path) -> None:
    """A notebook: parts are resumed, loaders give all samples, one rank is all."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    data = [(torch.full((2,), float(i)), i % 2) for i in range(10)]
    loader = ddpkit.train_loader(data, 4, workers=0)
    seen = []
    for turn in range(2):
        made = ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=optimizer)
        assert made.epoch == 2 * turn
        for epoch in made.epochs(2 + 2 * turn):
            for inputs, labels in made.steps(loader):
                seen.append((epoch, inputs[:, 0].tolist()))
                torch.nn.functional.cross_entropy(net(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert made.save_best(-epoch, is_higher=False)
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({str(numbers) for _, numbers in seen}) == 8  # each epoch in its order
    state = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert state["best"] == -3
    assert state["epoch"] == 3
    found = [
        label for _, labels in ddpkit.val_loader(data, 4, workers=0) for label in labels
    ]
    assert torch.stack(found).tolist() == [label for _, label in data]
    other = torch.optim.SGD(net.parameters(), 0.1)
    with refusal("states.fitting", "optimizer", "it was AdamW, now SGD"):
        ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=other)


BARE = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

NAMES = set(sys.argv[1:])
sys.meta_path.insert(0, Without())
import ddpkit
import torch
for name in "Checkpoints Run VirtualRanks run_main Criterion to_logits".split():
    getattr(ddpkit, name)
data = [(torch.zeros(2), 0)] * 8
assert len(list(ddpkit.train_loader(data, 2, workers=0))) == 4
assert not NAMES & set(sys.modules)
"""


def test_torch_and_numpy_alone(tmp_path: Path) -> None:
    """What is in the extras of pyproject.toml is imported by what needs it."""
    script = tmp_path / "bare.py"
    script.write_text(BARE)
    names = "torchvision timm PIL torchmetrics simplejpeg matplotlib tensorboard tqdm"
    command = [sys.executable, script, *names.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=env, check=True)


def test_weights_of_samples() -> None:
    """Drawn in these shares, the same on any number of ranks; others are refused."""
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0]).repeat(200)

    def drawn(of_ranks: int) -> list[int]:
        numbers = []
        for rank in range(of_ranks):
            distributed.world_size = lambda: of_ranks
            distributed.rank = lambda rank=rank: rank
            loader = ddpkit.train_loader(
                range(800), 8 // of_ranks, sample_weights=weights
            )
            numbers += [(i, key.number) for i, key in enumerate(loader.sampler)]
        return [
            sorted(n for i, n in numbers if i // (8 // of_ranks) == k) for k in range(9)
        ]

    world_size = distributed.world_size
    rank = distributed.rank
    try:
        assert drawn(1) == drawn(2) == drawn(4)
    finally:
        distributed.world_size = world_size
        distributed.rank = rank
    loader = ddpkit.train_loader(range(800), 8, sample_weights=weights, seed=1)
    kinds = torch.tensor([key.number % 4 for key in loader.sampler]).bincount(
        minlength=4
    )
    assert kinds[0] == kinds[3] == 0
    assert 540 < kinds[2] < 660
    for wrong in ([1.0] * 799, [-1.0] + [1.0] * 799, [0.0] * 800, [float("nan")] * 800):
        with refusal("loading.cumulate", "800 numbers"):
            ddpkit.train_loader(range(800), 8, sample_weights=wrong)
    with refusal("loading.init", "shuffle", "sample_weights="):
        ddpkit.train_loader(range(800), 8, shuffle=True)
