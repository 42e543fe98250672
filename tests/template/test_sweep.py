"""recipes/sweep.py: a search for flags whose trials are pruned, interrupted and resumed."""

import json
import os
import signal
import sys
from pathlib import Path

import optuna
import pytest
from generated import Command, Project, rows, wait_for


def start(project: Project, *words: object) -> Command:
    script = project.folder / "recipes/sweep.py"
    return Command([sys.executable, script, words], NPROC="1")


@pytest.mark.soak
def test_trials(project: Project, few: Path, tmp_path: Path) -> None:
    """Worse than two better ones a trial ends early; one that was interrupted resumes first."""
    copy = project.copy(tmp_path / "a copy")
    script = copy.folder / "recipes/sweep.py"
    folder = copy.folder / "runs/sweep"
    text = script.read_text()
    script.write_text(text.replace("TRIALS, HOURS = 20", "TRIALS, HOURS = 4"))
    folder.mkdir(parents=True)
    storage = f"sqlite:///{folder}/study.db"
    study = optuna.create_study(
        storage=storage, study_name="sweep", direction="maximize"
    )
    for score in 2.0, 3.0:  # that no training reaches
        levels = dict.fromkeys(range(1, 9), score)
        study.add_trial(
            optuna.trial.create_trial(value=score, intermediate_values=levels)
        )
    flags = copy.flags(few, tmp_path, "--epochs", 500)
    first = start(copy, flags)
    wait_for(lambda: os.path.exists(folder / "2/metrics.csv"))
    first.kill(signal.SIGTERM)
    assert first.end().status == 75
    assert (folder / "2/last.pt").exists()
    done = start(copy, flags).end().ok()
    assert "best top1 3.0 in trial 1:" in done.out
    assert "SIGTERM: stopped and saved" in done.out
    names = [trial.state.name for trial in study.get_trials()]
    assert names == ["COMPLETE", "COMPLETE", "FAIL", "PRUNED", "PRUNED"]
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4", "study.db"]
    failed, resumed = study.get_trials()[2:4]
    assert failed.params == resumed.params
    assert len(failed.params) == 3
    assert all(2 <= len(rows(folder / name)) < 500 for name in "24")
    assert (folder / "2/best.pt").exists()


def test_lower_is_better(project: Project, tmp_path: Path) -> None:
    """Scores have the other sign, so that the study looks for the lowest."""
    (tmp_path / "metrics.csv").write_text("epoch,val_loss\n1,0.5\n2,0.25\n")

    def read() -> None:
        sys.path.insert(0, "recipes")
        import sweep

        assert sweep.scores(tmp_path) == []  # args.json does not say yet which it is
        for direction, sign in ("min", -1), ("max", 1):
            text = json.dumps({"best": ["val_loss", direction]})
            (tmp_path / "args.json").write_text(text)
            assert sweep.scores(tmp_path) == [sign * 0.5, sign * 0.25]

    project.here(read).ok()
