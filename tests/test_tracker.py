"""A tracker gets what metrics.csv gets."""

import json
from pathlib import Path

from running import SAME_FOR_BOTH, Project, flags, rows

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
    text = (project.folder / "main.py").read_text()

    def script(name: str, before: str = "") -> Path:
        path = tmp_path / f"{name}.py"
        edited = text.replace("draw=draw_example,", "draw=draw_example, tracker=start_mlflow,")
        edited = edited.replace("    run = ddpkit.Run(", f"{start}    run = ddpkit.Run(")
        path.write_text(edited.replace("    with run:", f"{before}    with run:"))
        return path

    start = (
        "    def start_mlflow(run_id):\n"
        f"        __import__('sys').path.insert(0, {str(tmp_path)!r})\n"
        "        import mlflow\n"
        "        run = mlflow.start_run(run_id)\n"
        "        if run_id is None:\n"
        "            mlflow.log_params(vars(args))\n"
        "        log = lambda row: mlflow.log_metrics(row, step=int(row['epoch']))\n"
        "        return run.info.run_id, log\n"
    )
    kill = (
        "    import os\n"
        "    report = run.report.end_epoch\n"
        "    run.report.end_epoch = lambda rows, *more: (\n"
        "        report(rows, *more) if len(rows) < 3 else os.kill(os.getpid(), 9))\n"
    )
    killed, whole = script("killed", kill), script("whole")
    out = tmp_path / "out"
    words = flags(data, out, "--epochs", 3)
    done = project.fork(*words, script=killed)
    assert done.status == -9, done.err
    assert "did not take epoch 1 (ConnectionError: no route to host at all); trying" in done.out
    assert len(rows(out)) == 2
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
