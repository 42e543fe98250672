"""--profile, --find-batch-size, and a tracker that gets what metrics.csv gets."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from digest import digest
from running import SAME_FOR_BOTH, SCRIPTS, Project, flags, rows

from engine.run import machine, probing

STEP = "            run.end_step()  # saves"
REPORT = "            report.end_epoch(run.history, is_best)"
CATCH_UP = "    report.catch_up(run.history)"


def edited(project: Project, path: Path, *changes: tuple[str, str]) -> Path:
    """Write a main.py with other lines to `path`."""
    text = (project.folder / "main.py").read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


@SAME_FOR_BOTH
def test_profile(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """Stopped amid the trace there is none; the next start traces what is left; the same bits."""
    wait = (
        "            if run.step == 2 and rank == 0:\n"
        "                __import__('os').kill(__import__('os').getpid(), 15)\n"
        "                while not stopping.stop_requested():\n"
        "                    __import__('time').sleep(0.01)\n"
    )
    out = tmp_path / "out"
    stopped = edited(project, tmp_path / "stopped.py", (STEP, wait + STEP))
    done = project.fork(*flags(data, out, "--profile", 3), script=stopped)
    assert done.status == 75, done.err
    assert not (out / "profile").exists()
    done = project.fork(*flags(data, out, "--profile", 99), draws=False).ok()
    said = re.search(
        r"--profile: (\d) steps \(not 99: the epoch has no more\) in .*rank0.pt.trace.json;.*"
        r"((\n +\d+% of CPU time: .+){5})\n",
        done.out,
    )
    shares = [int(share) for share in re.findall(r" (\d+)% of CPU", said[2])]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 101
    assert [path.name for path in (out / "profile").iterdir()] == ["rank0.pt.trace.json"]
    events = json.loads((out / "profile" / "rank0.pt.trace.json").read_text())["traceEvents"]
    found = Counter(re.sub(r"ProfilerStep#\d+", "step", event.get("name", "")) for event in events)
    steps = int(said[1])
    assert 1 <= steps <= 3
    marks = ["step", "forward", "backward", "Optimizer.step#AdamW.step"]
    marks.append("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    assert [found[name] for name in marks] == [steps] * len(marks)
    assert digest(out) == digest(trained)


def test_the_search_for_a_batch_size() -> None:
    """The largest that fits, up to 16 exactly, then to 8 images; in few tries, never 1 image."""
    for limit in (*range(1, 40), 1000):
        for most in range(2, 300):
            tried: list[int] = []

            def fits(size: int, most: int = most, tried: list[int] = tried) -> bool:
                tried.append(size)
                return size <= most

            size = probing.search(fits, limit)
            assert size <= min(most, limit)
            assert size == limit or size + (8 if size >= 16 else 1) > most
            assert min(tried) >= min(2, limit)
            assert len(tried) < 16
    assert probing.search(lambda size: False, 9) == 0


GB, MANY = 10**9, 10**6


@SAME_FOR_BOTH
def test_batch_sizes_of_made_up_machines(project: Project) -> None:
    """Alike on all ranks, for the one with the least; nothing is tried that does not fit."""
    cases = {
        1: [
            ([(8 * GB, 5e6, MANY)], 1376),  # (7.2 GB - 0.3 GB) / 5 MB = 1380
            ([(0.4 * GB, 5e6, MANY)], 2),  # what takes how much is not clear yet
        ],
        2: [
            ([(8 * GB, 5e6, MANY), (8 * GB, 5e6, MANY)], 656),  # each gets half
            ([(9 * GB, 5e6, MANY), (8 * GB, 9e6, MANY)], 360),  # 3.3 GB / 9 MB = 366
            ([(8 * GB, 5e6, MANY), (8 * GB, 5e6, 100)], 96),  # a limit of that process
        ],
    }
    for ranks, made_up in cases.items():
        words = [json.dumps(each) for each, _ in made_up]
        done = project.fork(*words, ranks=ranks, script=SCRIPTS / "batch_sizes.py").ok()
        answers = [json.loads(line) for line in done.out.splitlines() if line.startswith("[[")]
        for answer, (ranks_of, found) in zip(answers, made_up, strict=True):
            assert [size for size, _, _ in answer] == [found] * ranks
            for (_, tried, left), (_, each, most) in zip(answer, ranks_of, strict=True):
                assert tried == 2 or tried * each <= left or most < tried < 2 * most


def test_free_memory_in_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that any level leaves, with the file cache; of v2, of v1, or the machine's."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    whole = machine.free_memory()
    assert 0 < whole < 2**50
    newer = {"max": "9000", "current": "5000", "stat": "anon 7\nactive_file 100\ninactive_file 20"}
    older = {"limit_in_bytes": "800", "usage_in_bytes": "500", "stat": "total_active_file 30"}
    for folder, content, free in (tmp_path, newer, 4120), (tmp_path / "memory", older, 330):
        folder.mkdir(exist_ok=True)
        for name, text in content.items():
            (folder / f"memory.{name}").write_text(f"{text}\n")
        assert machine.free_memory() == free
    (tmp_path / "memory" / "memory.limit_in_bytes").unlink()
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory() > 4120


def test_a_batch_size_that_trains(project: Project, data: Path, tmp_path: Path) -> None:
    """As many as 53 images allow, in one step; finding it leaves no folder."""
    more = flags(data, tmp_path / "out", "--accumulate", 3)
    done = project.fork(*more, "--find-batch-size").ok()
    assert done.out.splitlines()[-1] == "--batch-size 8"
    assert not (tmp_path / "out").exists()
    project.fork(*more, *done.out.splitlines()[-1].split(), draws=False).ok()
    assert rows(tmp_path / "out")[0]["step"] == "1"


@SAME_FOR_BOTH
def test_flags_that_exclude_each_other(project: Project) -> None:
    for words in (["--profile=3", "--eval-only"], ["--profile=3", "--find-batch-size"]):
        project.alone(*words).refused("not allowed with", "--profile", words[1])


FAKE_MLFLOW = """
import json
from pathlib import Path
from types import SimpleNamespace

calls = Path(__file__).with_suffix(".calls")

def note(*call):
    with open(calls, "a") as file:
        file.write(json.dumps(call) + "\\\\n")

def start_run(run_id=None):
    note("start_run", run_id)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "a1b2"))

def log_params(params):
    note("log_params", params["batch_size"])

def log_metrics(metrics, step=None):
    if sum("log_metrics" in line for line in open(calls)) == FAILS:
        note("log_metrics fails")
        raise ConnectionError("no route to host\\\\nat all")
    note("log_metrics", step, metrics)
"""


@SAME_FOR_BOTH
def test_a_tracker(project: Project, data: Path, tmp_path: Path) -> None:
    """It fails once, and the run is killed before the last report: it gets each row once."""
    (tmp_path / "mlflow.py").write_text(FAKE_MLFLOW.replace("FAILS", "0").replace("\\\\n", "\\n"))
    start = (
        "    def start_mlflow(run_id):\n"
        f"        __import__('sys').path.insert(0, {str(tmp_path)!r})\n"
        "        import mlflow\n"
        "        run = mlflow.start_run(run_id)\n"
        "        if run_id is None:\n"
        "            mlflow.log_params(flags)\n"
        "        log = lambda row: mlflow.log_metrics(row, step=int(row['epoch']))\n"
        "        return run.info.run_id, log\n"
    )
    tracked = (CATCH_UP, start + CATCH_UP.replace(")", ", start_mlflow)"))
    kill = f"{REPORT} if run.epoch < 3 else __import__('os').kill(__import__('os').getpid(), 9)"
    killed = edited(project, tmp_path / "killed.py", tracked, (REPORT, kill))
    out = tmp_path / "out"
    words = flags(data, out, "--epochs", 3)
    done = project.fork(*words, script=killed)
    assert done.status == -9, done.err
    assert "did not take epoch 1 (ConnectionError: no route to host at all); trying" in done.out
    assert len(rows(out)) == 2
    whole = edited(project, tmp_path / "whole.py", tracked)
    for _ in range(2):
        done = project.fork(*words, script=whole).ok()
    assert "nothing left to do" in done.out
    calls = [json.loads(line) for line in (tmp_path / "mlflow.calls").read_text().splitlines()]
    assert [call[:2] for call in calls] == [
        ["start_run", None],
        ["log_params", 4],
        ["log_metrics fails"],
        ["log_metrics", 1],
        ["log_metrics", 2],
        ["start_run", "a1b2"],
        ["log_metrics", 3],
    ]
    taken = [call[2] for call in calls if call[0] == "log_metrics"]
    assert [{k: str(v) for k, v in row.items()} for row in taken] == rows(out)
    again = project.fork(*words, "--resume", "never", "--epochs", 1, script=whole).ok()
    assert "tracker.json" in again.out
