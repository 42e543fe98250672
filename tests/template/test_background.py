"""The suite, soak and benchmarks started with signals ignored, as `nohup make test &` is."""

import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from foreground import FROM_TERMINAL
from generated import ROOT, run


def begin_soak() -> None:
    names = runpy.run_path(str(ROOT / "tests/soak"), run_name="soak")
    act = names["main"].__globals__

    def begun(*_: Any) -> None:
        raise InterruptedError

    act["Setting"] = begun
    with pytest.raises(InterruptedError):
        act["main"]()


def begin_benchmark() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import common

    common.parser("")


def test_the_suite(tmp_path: Path) -> None:
    """Also in a worker of pytest-xdist."""
    trap = "trap '' INT QUIT HUP; exec \"$@\""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", 1]
    command += ["--basetemp", tmp_path, f"{__file__}::test_what_a_test_starts"]
    env = {"PYTEST_XDIST_WORKER": None}  # that of this test
    run(["sh", "-c", trap, "sh", *command], ROOT, **env).ok()


def test_what_a_test_starts() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = f"""if True:
        import os, signal
        for signum in {[*map(int, FROM_TERMINAL)]}:
            assert signal.getsignal(signum) != signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGINT)
    """
    child = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert child.returncode == -signal.SIGINT, child.stderr


@pytest.mark.parametrize("begin", [begin_soak, begin_benchmark])
def test_others(begin: Callable[[], None], tmp_path: Path) -> None:
    def act() -> None:
        for signum in FROM_TERMINAL:
            signal.signal(signum, signal.SIG_IGN)
        begin()
        test_what_a_test_starts()

    output = tmp_path / "said"
    assert ranks.wait([ranks.fork(act, output)]) == [0], ranks.said(output)
