"""Which crops, and the mirror or not? The same budget with each, on a data set of your own.

The demo set of the task, or --data DIR; --flags are for all runs, such as "@recipes/elpv.txt", with
absolute paths to other files. A row of the table is one of --cases: the mean over the seeds of the
best score, the least and the greatest. Runs differ by case and seed alone, and take turns by seed.
"""

import shlex
import statistics
import sys
import tempfile
from pathlib import Path

import common

CASES = {
    "classification": [
        f"--crop-scale {scale} --hflip {hflip}"
        for scale in (0.25, 0.5, 0.7, 1)
        for hflip in (0.5, 0)
    ],
    "segmentation": ["--hflip 0.5", "--hflip 0"],
}
SCORES = "top1", "map", "miou"  # the first of these is that of best.pt


def main() -> None:
    parser = common.parser(__doc__, common.TASKS)
    parser.add_argument("--data", type=Path, help="folder (default: the demo set)")
    parser.add_argument("--flags", default="", help="of main.py, for all runs")
    parser.add_argument("--cases", nargs="+", help='such as "--lr 0.001" "--lr 0.003"')
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    common.say_machine(given)
    cases = given.cases or CASES[given.task]
    found: dict[str, list[float]] = {case: [] for case in cases}
    with common.generated(given.task) as folder:
        words = shlex.split(given.flags)
        if given.data:
            words += ["--data", str(given.data.resolve())]
        for seed in given.seeds:
            for case in cases:
                flags = [*words, *case.split(), "--seed", seed]
                found[case].append(best(folder / "project", flags))
                print(f"seed {seed}  {case}: {found[case][-1]:.4f}", file=sys.stderr)
    lines = [("flags", "best score, mean", "min..max")]
    for case, scores in found.items():
        ends = f"{min(scores):.3f}..{max(scores):.3f}"
        lines.append((case, f"{statistics.mean(scores):.3f}", ends))
    common.markdown(lines)


def train(project: Path, output: Path, words: list) -> None:
    command = [sys.executable, project / "main.py", "--output-dir", output]
    common.run([*command, "--weights", "none", *words], timeout=7200, cwd=project)


def best(project: Path, flags: list) -> float:
    """Train; return the best score of its epochs."""
    with tempfile.TemporaryDirectory(prefix="benchmark-run-") as output:
        train(project, Path(output), flags)
        rows = common.rows(Path(output))
    name = next(name for name in SCORES if name in rows[0])
    return max(float(row[name]) for row in rows)


if __name__ == "__main__":
    main()
