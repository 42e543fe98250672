"""The project on GPUs that are not there; gpus.py says what of them is real."""

import subprocess
import sys
from pathlib import Path

import gpus
import pytest
from generated import in_soak


@pytest.mark.skipif(bool(gpus.missing()), reason=gpus.missing())
@pytest.mark.parametrize("which", ["not soak", in_soak("soak")])
def test_on_gpus(tmp_path, monkeypatch, which):
    """The tests of on_gpus.py pass in a pytest whose forks see three GPUs."""
    monkeypatch.setenv("FAKE_GPU_FOLDER", str(tmp_path))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    tests = Path(__file__).with_name("on_gpus.py")
    command = [sys.executable, gpus.__file__, "3", sys.executable, "-m", "pytest"]
    command += ["-p", "no:cacheprovider", "--durations", "0", "-m", which, tests]
    done = subprocess.run(command, text=True, capture_output=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
