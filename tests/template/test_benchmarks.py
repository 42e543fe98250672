"""Each benchmark from start to end, with sizes of which no figure is worth having.

Peers that are not installed are no cases then, and a GPU that is not there is said.
"""

import functools
import importlib
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
from generated import (
    NETS,
    ROOT,
    TASKS,
    Done,
    Project,
    both_but_one_in_soak,
    in_soak,
    left,
    rows,
    run,
    texts,
    wait_for,
)

FOLDER = ROOT / "benchmarks"
SIZES = ["--image-size", "32", "--batch-size", "4"]
FLAGS = {task: " ".join([*NETS[task], *SIZES]) for task in TASKS}
of_both = pytest.mark.parametrize("task", both_but_one_in_soak)


class Forks:
    """What stands for the benchmarks' launchers in a fork of this process."""

    def __init__(self, folder: Path) -> None:
        self.outputs = (folder / f"output {number}" for number in itertools.count())

    def start(
        self,
        count: int,
        script: object,
        words: list,
        folder: Path,
        stop_when: Path | None = None,
        **env: object,
    ) -> str:
        """Run a script on forks, stopped once the file `stop_when` is there; return its stdout."""

        def patch() -> None:
            ranks.draw_nothing()
            os.environ.update({name: str(value) for name, value in env.items()})

        said = next(self.outputs)
        pids = ranks.start(count, str(script), texts(words), said, folder, patch)
        if stop_when:
            wait_for(stop_when.exists)
            os.kill(pids[0], signal.SIGTERM)
        status = 75 if stop_when else 0
        assert ranks.wait(pids) == [status] * count, ranks.said(said)
        return ranks.said(said)[0]

    def train(
        self,
        project: Path,
        output: Path,
        words: list,
        stop_when: Path | None = None,
        on: int = 1,
    ) -> None:
        library = project / "ddpkit"
        if not library.is_symlink():
            shutil.rmtree(library)
            library.symlink_to(ROOT / "ddpkit")  # which this process has imported
        words = ["--output-dir", output, "--weights", "none", *words]
        self.start(on, "main.py", words, project, stop_when)

    def launch(
        self, project: Path, count: int, _: int, words: list
    ) -> dict[str, float]:
        """As launch.sh."""
        output = next(self.outputs)
        self.train(project, output, words, on=count)
        return {name: float(value) for name, value in rows(output)[-1].items()}

    def run(self, command: list, **env: object) -> str:
        """As torchrun."""
        place = command.index("--nproc-per-node") + 1
        script, *words = command[place + 1 :]
        return self.start(command[place], script, words, FOLDER, **env)


def benchmark(folder: Path, name: str, *words: object) -> Done:
    """A benchmark in a fork."""

    def act() -> None:
        import common

        forks = Forks(folder)
        common.launch = forks.launch
        common.run = forks.run
        module = importlib.import_module(name)
        if name == "input":
            module.SIDES = dict.fromkeys(TASKS, (96, 72))
        if name == "virtual_ranks":
            module.start = forks.train
        if name == "defaults":
            module.train = forks.train
        if name == "resume":

            def train(case: str, folder: Path, *words: str) -> tuple[int, str]:
                said = next(forks.outputs)
                own = functools.partial(module.train, case, folder, bool(words))
                return ranks.wait([ranks.fork(own, said)])[0], ranks.said(said)[1]

            module.run = train
        if name == "gpu":

            def measured(function: str, *given: object) -> Any:
                return common.in_child(getattr(module, function), *texts(given))

            module.measured = measured
            module.train = forks.train
            module.SECONDS = 0.1
        repeats = [] if name == "resume" else ["--repeats", 1]
        sys.argv = [f"{name}.py", *texts([repeats, words])]
        try:
            module.main()
        except SystemExit as error:
            print(error, file=sys.stderr)  # as Python does
            raise

    said = folder / "said"
    statuses = ranks.wait([ranks.fork(act, said, FOLDER)])
    return Done(statuses, *ranks.said(said), left())


@of_both
def test_step(tmp_path: Path, task: str) -> None:
    words = "--task", task, "--flags", FLAGS[task]
    done = benchmark(tmp_path, "step", "--steps", 2, words)
    assert "| ours" in done.ok().out
    done = benchmark(tmp_path, "step", "--device", "gpu", words)
    assert done.status == 1
    assert "torch finds only cpu" in done.err


@of_both
def test_overheads(tmp_path: Path, task: str) -> None:
    words = "--steps", 3, "--task", task, "--flags", FLAGS[task]
    assert "| progress bar drawn" in benchmark(tmp_path, "overheads", words).ok().out
    host = benchmark(tmp_path, "overheads", words, "--host").ok().out
    assert "| ours - bare DDP loop |" in host
    found = benchmark(tmp_path, "overheads", words, "--host", "--profile").ok().out
    assert "run/loop.py" in found


@of_both
def test_input(tmp_path: Path, task: str) -> None:
    words = "--images", 32, "--reads", 32, "--side", 32, "--task", task
    assert "| ours" in benchmark(tmp_path, "input", words).ok().out


def test_training(tmp_path: Path) -> None:
    sizes = "--images", 16, "--arch", "shufflenet_v2_x0_5", SIZES
    done = benchmark(tmp_path, "training", sizes, "--workers", 1, "--ranks", 2).ok()
    assert "waiting for images, ours: " in done.out


def test_scaling(tmp_path: Path) -> None:
    words = "--images", 32, "--flags", FLAGS["segmentation"]
    assert "share of linear: " in benchmark(tmp_path, "scaling", words).ok().out


def test_virtual_ranks(tmp_path: Path) -> None:
    """With the flag each network has one checksum, on one and on two ranks."""
    words = "--images", 32, "--ranks", 1, 2
    said = benchmark(tmp_path, "virtual_ranks", words).ok().out
    rows = [line.split("|")[1:-1] for line in said.splitlines() if "Norm" in line]
    with_flag = {(row[0], row[3], row[5]) for row in rows if "--virtual" in row[1]}
    assert len(rows) == 8
    assert len(with_flag) == 2


@pytest.mark.parametrize("project", ["classification"], indirect=True)
def test_defaults(project: Project, few: Path, tmp_path: Path) -> None:
    cases = "--cases", "--hflip 0", "--hflip 0.5", "--seeds", 0
    words = f"{FLAGS['classification']} --epochs 1 --workers 0"
    more = "--data", few, f"--flags={words}"
    done = benchmark(tmp_path, "defaults", cases, more).ok()
    assert "| --hflip 0 " in done.out
    assert "| --hflip 0.5 " in done.out


def test_resume(tmp_path: Path) -> None:
    """Of two that are always there: ddpkit goes on exactly, torch's example does not."""
    names = "plain torch", "ddpkit.Checkpoints"
    done = benchmark(tmp_path, "resume", names).ok()
    ends = [line.split("|")[-2].strip() for line in done.out.splitlines()[-3:-1]]
    assert ends == ["differ", "identical"]


def test_recorder(tmp_path: Path) -> None:
    assert "| with it" in benchmark(tmp_path, "recorder", "--steps", 2).ok().out


PARTS = {
    "input": ["--images", 32, "--side", 32, "--workers", 1],
    "memory": ["--flags", FLAGS[TASKS[0]]],
    "checkpoint": ["--flags", FLAGS[TASKS[0]]],
    "determinism": ["--images", 16, "--flags", FLAGS[TASKS[0]]],
    "resume": ["--images", 32, "--flags", FLAGS[TASKS[0]]],
    "nvjpeg": ["--images", 8, "--flags", FLAGS[TASKS[0]]],
}


MARKED = [
    in_soak(part) if part in ("resume", "determinism") else part for part in PARTS
]


@pytest.mark.parametrize("part", MARKED)
def test_of_a_gpu(tmp_path: Path, part: str) -> None:
    """On a CPU, which proves no more than that it runs."""
    assert "| --" in benchmark(tmp_path, "gpu", part, PARTS[part]).ok().out


def test_gpu_sh() -> None:
    script = FOLDER / "gpu.sh"
    listed = run([script, "--list"]).ok().out
    assert all(f"\n  {part} " in listed for part in PARTS)
    done = run([script], CUDA_VISIBLE_DEVICES="")
    assert done.status == 2
    assert "torch finds no GPU here" in done.err
