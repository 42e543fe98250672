"""The project on a GPU that lacks what Apple's lacks; fakeapple/device.cpp says what."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from generated import ROOT, in_soak

from ddpkit.ranks import environment

SOURCES = ROOT / "tests/fakeapple"


def build(source: Path) -> Path:
    """Compile it, which takes ten seconds, if that was not done before for this torch."""
    known = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()
    folder = Path(tempfile.gettempdir(), f"ddp-template-fakeapple-{os.getuid()}")
    folder.mkdir(0o700, exist_ok=True)
    built = folder / f"{known[:16]}.so"
    if not built.exists():
        own = folder / str(os.getpid())
        torchs = Path(torch.__file__).parent
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", source, "-o", own]
        command += [f"-I{torchs}/include", f"-L{torchs}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True)
        own.rename(built)
    return built


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize("which", ["not soak", in_soak("soak")])
def test_on_apple(monkeypatch, which):
    """The tests of on_apple.py pass in a pytest whose forks have that GPU."""
    monkeypatch.setenv("FAKE_APPLE", str(build(SOURCES / "device.cpp")))
    monkeypatch.setenv("FAKE_GPUS", "0")  # for ranks.py to hide none
    monkeypatch.setenv("PYTHONPATH", f"{SOURCES}:{os.environ.get('PYTHONPATH', '')}")
    for name in "CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER":
        monkeypatch.delenv(name, raising=False)
    tests = Path(__file__).with_name("on_apple.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["--durations", "0", "-m", which, tests]
    done = subprocess.run(command, text=True, capture_output=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("system", "visible", "ranks"),
    [
        (("darwin", "arm64"), None, 1),
        (("darwin", "arm64"), "-1", 2),
        (("darwin", "arm64"), "", 2),
        (("darwin", "x86_64"), None, 2),
    ],
)
def test_ranks_of_launch_sh_on_a_mac(system, visible, ranks, monkeypatch, tmp_path):
    """One on Apple's GPU, and as elsewhere two on the CPU; torch is not asked."""
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    monkeypatch.setattr(sys, "platform", system[0])
    monkeypatch.setattr(environment.platform, "machine", lambda: system[1])
    monkeypatch.setattr(environment, "GPU_FILES", [])
    assert environment.read_nodes().ranks == ranks
