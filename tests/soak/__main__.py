"""Random cases, in turn, until the minutes are over: make soak MINUTES=30

What takes long, or happens by chance, and is therefore not in `make test`. The seed is printed. A
case that fails prints how to repeat it, what it said is kept, and the others go on; the status is
then 1. Variables:

  MINUTES   how long, at least one case of each subject (default: 30)
  SEED      of all chance (default: of the clock)
  CASE      only this case, such as damage/12, or only this subject, such as damage
  KEEP      the folder for what failed (default: a new one in TMPDIR)
"""

import ctypes
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(TESTS), str(TESTS.parent)]

import foreground  # noqa: E402
import ranks  # noqa: E402
import subjects  # noqa: E402
from generated import LIVE, children, kill  # noqa: E402
from setting import Setting  # noqa: E402
from subjects import Subject  # noqa: E402

PR_SET_CHILD_SUBREAPER = 36


class Soak:
    """The cases of one start."""

    def __init__(self, seed: int, folder: Path, setting: Setting) -> None:
        self.seed = seed
        self.folder = folder
        self.setting = setting
        self.spent = dict.fromkeys(subjects.ALL, 0.0)  # seconds of each subject
        self.number = dict.fromkeys(subjects.ALL, 0)  # of its next case
        self.failed: list[str] = []

    def next(self) -> Subject:
        """Return the subject that is furthest behind its share of the time."""
        going = [each for each in subjects.ALL if self.number[each] < each.at_most]
        return min(going, key=lambda subject: self.spent[subject] / subject.share)

    def run(self, subject: Subject, number: int) -> None:
        """Run one case in a fork, print its line, and end whatever it has left."""
        name = f"{subject.name}/{number}"
        folder = self.folder / name.replace("/", "-")
        folder.mkdir()
        began = time.monotonic()
        pid = ranks.fork(lambda: self.act(subject, name, folder), folder / "said")
        status = ranks.wait([pid], subject.seconds)[0]
        seconds = time.monotonic() - began
        kill(children(LIVE), signal.SIGKILL)
        self.spent[subject] += seconds
        out, err = ranks.said(folder / "said")
        lines = out.splitlines() + err.splitlines()
        if status == 0:
            told = out.strip().rpartition("\n")[2]
            print(f"{name:16} {seconds:5.0f} s  {told}", flush=True)
            shutil.rmtree(folder)
        else:
            self.report(name, status, seconds, lines, subject)

    def act(self, subject: Subject, name: str, folder: Path) -> None:
        """The case, in its fork: its chance follows from the seed and its name alone."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        temporary = folder / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        chance = random.Random(f"{self.seed} {name}")
        try:
            print(subject.act(chance, folder, self.setting))
        except Exception:
            traceback.print_exc()
            kill(children(), signal.SIGKILL)
            sys.exit(1)

    def report(
        self,
        name: str,
        status: int,
        seconds: float,
        lines: list[str],
        subject: Subject,
    ) -> None:
        took = seconds > subject.seconds
        what = f"not ended after {seconds:.0f} s" if took else f"status {status}"
        last = lines[-1] if lines else ""
        print(f"{name:16} {seconds:5.0f} s  FAILED, {what}: {last}")
        for line in lines[-25:]:
            print(f"    {line}")
        print(f"    again: make soak SEED={self.seed} CASE={name}")
        print(f"    kept:  {self.folder / name.replace('/', '-')}", flush=True)
        self.failed.append(name)


def main() -> int:
    foreground.restore_signals()
    minutes = float(os.environ.get("MINUTES") or 30)
    seed = int(os.environ.get("SEED") or time.time_ns() % 10**6)
    wanted, _, number = os.environ.get("CASE", "").partition("/")
    folder = Path(os.environ.get("KEEP") or tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"SEED={seed} MINUTES={minutes:g}", flush=True)
    soak = Soak(seed, folder, Setting(seed, folder / "setting"))
    over = time.monotonic() + 60 * minutes
    if wanted:
        chosen = next(subject for subject in subjects.ALL if subject.name == wanted)
    while True:
        subject = chosen if wanted else soak.next()
        is_enough = time.monotonic() > over and (wanted or all(soak.number.values()))
        if is_enough or soak.number[subject] >= subject.at_most:
            break
        soak.run(subject, int(number) if number else soak.number[subject])
        soak.number[subject] += 1
        if number:
            break
    counts = ", ".join(
        f"{n} of {subject.name}" for subject, n in soak.number.items() if n
    )
    print(f"SEED={seed}: {counts}; failed: {', '.join(soak.failed) or 'none'}")
    if not soak.failed:
        shutil.rmtree(folder)
    return int(bool(soak.failed))


if __name__ == "__main__":
    sys.exit(main())
