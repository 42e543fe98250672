"""Search for flags with optuna: python recipes/sweep.py [flags of main.py, for all trials]

A trial is a run of ./launch.sh in runs/sweep/NUMBER. One that is worse than the median of those
before it, at the same epoch, is stopped; nothing is removed. Started again, the search continues,
and a trial that was interrupted resumes. Run one search at a time.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

try:
    import optuna
    from optuna.distributions import BaseDistribution, FloatDistribution
    from optuna.trial import TrialState
except ModuleNotFoundError:
    print("error: no optuna: python -m pip install optuna", file=sys.stderr)
    sys.exit(2)

# edit it: CategoricalDistribution(["a", "b"]) is a choice
SPACE: dict[str, BaseDistribution] = {
    "--lr": FloatDistribution(1e-4, 1e-2, log=True),
    "--weight-decay": FloatDistribution(1e-3, 0.3, log=True),
    "--label-smoothing": FloatDistribution(0, 0.2),
}
TRIALS, HOURS = 20, 24  # in all; for one trial at most
PRUNER = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=2)
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs/sweep"


def best_of(folder: Path) -> tuple[str, int]:
    """Return the metric that chooses best.pt, and -1 if lower ones are better."""
    name, direction = json.loads((folder / "args.json").read_text("utf-8"))["best"]
    return name, -1 if direction == "min" else 1


def scores(folder: Path) -> list[float]:
    """Return the metric of each epoch so far, with another sign if lower ones are better."""
    try:
        name, sign = best_of(folder)
        with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
            return [sign * float(row[name]) for row in csv.DictReader(file)]
    except (FileNotFoundError, KeyError):  # it has only just begun
        return []


def run(study: optuna.Study, trial: optuna.Trial) -> None:
    folder = FOLDER / trial.user_attrs.get("folder", str(trial.number))
    flags = [f"{flag}={value}" for flag, value in trial.params.items()]
    print(f"trial {trial.number} in {folder}:", *flags, flush=True)
    launch = [str(ROOT / "launch.sh")]
    if os.name == "nt":  # Windows has no bash
        launch = [sys.executable, "-m", "ddpkit", "launch", str(ROOT / "main.py")]
    command = [*launch, *sys.argv[1:], *flags, f"--output-dir={folder}"]
    launcher = subprocess.Popen(command, env={"PYTHON": sys.executable, **os.environ})
    end, is_pruned, epoch = time.monotonic() + HOURS * 3600, False, 0
    try:
        while launcher.poll() is None and time.monotonic() < end and not is_pruned:
            time.sleep(0.5)
            for score in scores(folder)[epoch:]:
                epoch += 1
                trial.report(score, epoch)
                is_pruned = is_pruned or trial.should_prune()
        is_stopped = launcher.poll() is None
    finally:
        # it saves and exits with 75; it kills ranks that take 120 s
        launcher.terminate()
        status = launcher.wait(150)
    if status == 75 and not is_stopped:
        sys.exit(75)  # by somebody else: the next start resumes it
    found = [score for score in scores(folder) if score == score]  # not NaN
    if found:
        study.set_user_attr("best", best_of(folder))
    is_done = status == 0 and bool(found)
    state = TrialState.PRUNED if is_pruned else TrialState.FAIL
    study.tell(trial, max(found) if is_done else None, None if is_done else state)
    if status == 2 and not found:
        sys.exit(2)  # a mistake in the flags, with which others would end, too


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: sys.exit(75))
    FOLDER.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = f"sqlite:///{FOLDER}/study.db"
    study = optuna.create_study(
        storage=url,
        study_name="sweep",
        pruner=PRUNER,
        direction="maximize",
        load_if_exists=True,
    )
    for old in study.get_trials(states=[TrialState.RUNNING]):  # interrupted
        folder = old.user_attrs.get("folder", str(old.number))
        study.enqueue_trial(old.params, user_attrs={"folder": folder})
        study.tell(old.number, state=TrialState.FAIL)
    for _ in range(
        TRIALS - len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))
    ):
        run(study, study.ask(SPACE))
    if study.get_trials(states=[TrialState.COMPLETE]):
        best = study.best_trial
        flags = (f"{flag}={value}" for flag, value in best.params.items())
        name, sign = study.user_attrs.get("best", ("score", 1))
        print(f"best {name} {sign * best.value} in trial {best.number}:", *flags)


if __name__ == "__main__":
    main()
