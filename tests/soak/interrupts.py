"""A run that is interrupted anyhow and started again ends with the bits of one that is not."""

import csv
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import configurations
import torch
from configurations import Configuration
from digest import IGNORED, SPEED, digest
from generated import Done, children, kill
from launcher import Launch, RealLaunch
from ranks import draw_nothing
from setting import Setting

CONFIGURATIONS = 24  # of a soak; each is run once without interruption
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL]
SAVED = {0, 75}
SECONDS = 120  # that a start may take after its last signal
LONGEST = "the ranks did not exit"
# Files whose change is a moment; "": seconds
MOMENTS = ["", "", ".last.pt.part", ".best.pt.part", "best.pt", "metrics.csv"]


def case(chance: random.Random, folder: Path, setting: Setting) -> str:
    number = chance.randrange(CONFIGURATIONS)
    of_number = random.Random(f"{setting.seed} configuration {number}")
    configuration = configurations.draw(of_number)
    print(configuration)
    twin = setting.folder / f"twin {number}"
    if not (twin / "seconds").exists():
        began = time.monotonic()
        start(configuration, setting, twin, folder, "0").ok()
        (twin / "seconds").write_text(str(time.monotonic() - began))
    out = folder / "out"
    told = []
    shared = shared_memory()
    for _ in range(chance.randrange(1, 5)):
        told.append(interrupt(chance, configuration, setting, out, folder, twin))
        print(told[-1])
    start(configuration, setting, out, folder, chance.choice("0123")).ok()
    compare(twin, out)
    is_killed = any("SIGKILL" in each or "worker" in each for each in told)
    if not is_killed:
        wait_until(lambda: not list((folder / "tmp").iterdir()), "left in TMPDIR")
    wait_until(lambda: not shared_memory() - shared, "left in /dev/shm")
    return f"{'; '.join(told)} | {configuration}"


def start(
    configuration: Configuration,
    setting: Setting,
    out: Path,
    folder: Path,
    every: str,
) -> Done:
    return begin(configuration, setting, out, folder, every).end(SECONDS)


def begin(
    configuration: Configuration,
    setting: Setting,
    out: Path,
    folder: Path,
    every: str,
    restarts: str = "0",
    is_real: bool = False,
) -> Launch | RealLaunch:
    """Start a launcher; what it says goes to a file of its own."""
    number = len(list(folder.glob("start *.out")))
    words = configuration.words(setting, every, out)
    project = setting.projects[configuration.task]
    env = {"NPROC": str(configuration.ranks), "MAX_RESTARTS": restarts}
    if is_real:
        return RealLaunch(project.folder, words, **env)
    patch = (lambda: None) if configuration.draws else draw_nothing
    return Launch(project.folder, words, folder / f"start {number}", patch, **env)


def interrupt(
    chance: random.Random,
    configuration: Configuration,
    setting: Setting,
    out: Path,
    folder: Path,
    twin: Path,
) -> str:
    """Start it, send signals at some moment, wait for its end; return what was done."""
    restarts = chance.choice("0000001")
    is_real = chance.random() < 0.05
    every = chance.choice("0123")
    run = begin(configuration, setting, out, folder, every, restarts, is_real)
    seconds = float((twin / "seconds").read_text()) + 8 * is_real  # to import torch
    told = ("launch.sh " if is_real else "") + wait_for_moment(chance, out, seconds)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        who, pids = chance.choice(TARGETS)(run, chance)
        signum = chance.choice(SIGNALS)
        if who == "a worker":  # which ignores the others
            signum = signal.SIGKILL
        kill(pids, signum)
        told += f", {signum.name} to {who}"
        time.sleep(chance.choice([0, chance.uniform(0, 0.3), chance.uniform(0, 1.5)]))
    done = run.end(SECONDS)
    assert not done.left, f"{told}: left {done.left}\n{done.out}{done.err}"
    assert "Traceback" not in done.err, f"{told}:\n{done.err}"
    assert done.status != 2, f"{told}:\n{done.err}"
    assert LONGEST not in done.err, f"{told}:\n{done.err}"
    return f"{told}: {done.status}"


def wait_for_moment(chance: random.Random, out: Path, longest: float) -> str:
    """Wait for some seconds, or until a file appears or changes; then for a moment."""
    name = chance.choice(MOMENTS)
    if not name:
        seconds = chance.uniform(0, longest)
        time.sleep(seconds)
        return f"after {seconds:.1f} s"
    path = out / name
    deadline = time.monotonic() + longest
    before = changed(path)
    while changed(path) in (before, 0) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(chance.choice([0, chance.uniform(0, 0.05), chance.uniform(0, 0.5)]))
    return f"at {name}"


def changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


Run = Launch | RealLaunch
Target = Callable[[Run, random.Random], tuple[str, list[int]]]


def to_launcher(run: Run, chance: random.Random) -> tuple[str, list[int]]:
    return "the launcher", [run.pid]


def to_rank(run: Run, chance: random.Random) -> tuple[str, list[int]]:
    there = run.ranks()  # once: the last may end meanwhile
    return "a rank", [chance.choice(there)] if there else []


def to_ranks(run: Run, chance: random.Random) -> tuple[str, list[int]]:
    return "all ranks", run.ranks()


def to_all(run: Run, chance: random.Random) -> tuple[str, list[int]]:
    return "all", list(children())


def to_group(run: Run, chance: random.Random) -> tuple[str, list[int]]:
    return "its group", [-run.pid]


def to_worker(run: Run, chance: random.Random) -> tuple[str, list[int]]:
    there = run.ranks()
    workers = [pid for pid, parent in children().items() if parent in there]
    return "a worker", [chance.choice(workers)] if workers else []


TARGETS: list[Target] = [
    to_launcher,
    to_launcher,
    to_rank,
    to_ranks,
    to_all,
    to_group,
    to_worker,
]


def compare(twin: Path, out: Path) -> None:
    """Weights, optimizer, scheduler, averages, history, best and table are the twin's."""
    for name in "last.pt", "best.pt":
        whole = torch.load(twin / name, weights_only=True)
        found = torch.load(out / name, weights_only=True)
        differ = differences(whole, found)
        assert not differ, f"{name} differs: {differ}"
    assert digest(twin) == digest(out)
    assert table(twin) == table(out)


def differences(one: object, other: object, name: str = "") -> list[str]:
    """Return what is not the same to the bit, by name; flags and speed aside."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in one | other if key not in IGNORED]
        pairs = [(one.get(key), other.get(key), f"{name}.{key}") for key in keys]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{name}: {len(one)} and {len(other)}"]
        pairs = [(one[n], other[n], f"{name}.{n}") for n in range(len(one))]
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_same = one.shape == other.shape and one.dtype == other.dtype
        is_same = is_same and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        return [] if is_same else [name]
    else:
        return [] if repr(one) == repr(other) else [f"{name}: {one!r} and {other!r}"]
    found = []
    for mine, theirs, place in pairs:
        found += differences(mine, theirs, place)
    return found


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv, without the columns of speed."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: row[name] for name in row if name not in SPEED} for row in rows]


def shared_memory() -> set[str]:
    """The files in /dev/shm that no living process has made."""
    found = set()
    for path in Path("/dev/shm").iterdir():
        maker = re.match(r"torch_(\d+)_", path.name)
        if not maker or not os.path.exists(f"/proc/{maker[1]}"):
            found.add(path.name)
    return found


def wait_until(condition: Callable[[], object], what: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
