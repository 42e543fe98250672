"""On a real SLURM: the ways to start, and slurm/train.sbatch.

Two virtual nodes on this machine, from Debian's packages, which are only unpacked. Each node has a
mount namespace of its own, in which the nodes' names resolve. Jobs run side by side: most of the
time SLURM waits, for a requeue.
"""

import contextlib
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from digest import digest
from generated import LIVE, SMALL, children, left, wait_for
from ports import free_port

PACKAGES = (
    *("libhwloc15", "liblua5.1-0", "libmunge2", "munge"),
    *("slurm-client", "slurm-wlm-basic-plugins", "slurmctld", "slurmd"),
)
NODES = ("n1", "n2")
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
AuthInfo=socket={folder}/munge.sock,cred_expire=5
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=20
MinJobAge=3600
FirstJobId={first}
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={} NodeHostname=localhost NodeAddr=127.0.0.1 Port={} CPUs=8 State=UNKNOWN"
DAEMON = "mount --bind '{}/hosts' /etc/hosts && exec slurmd -D -N {} -d '{}/usr/sbin/slurmstepd'"
# SLOW: each step of a job's first start sleeps. KILL: each start dies in its second step.
PLANTED = """
import os, time
if "SLOW" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(1)
if "KILL" in os.environ and run.step == 1 + globals().setdefault("first step", run.step):
    os.kill(os.getpid(), 9)
"""
ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def unpack() -> Path:
    """Return the folder into which the packages are unpacked, once for each kind of machine."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = home / "ddp-template" / f"slurm-{platform.machine()}"
    if root.is_dir():
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    get = f"apt-get --quiet download {' '.join(PACKAGES)}"
    get = f"{get} || {{ apt-get --quiet update && {get}; }}"
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        parts = Path(folder)
        if subprocess.run(get, shell=True, cwd=parts, capture_output=True, timeout=600).returncode:
            pytest.skip("no SLURM: its packages cannot be downloaded")
        for package in parts.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, parts / "root"], check=True)
        for path in (parts / "root/usr/sbin").glob("slurm*-wlm"):
            path.with_name(path.name.removesuffix("-wlm")).symlink_to(path.name)
        with contextlib.suppress(OSError):  # another process has done the same meanwhile
            (parts / "root").rename(root)
    return root


class Slurm:
    """A running SLURM."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.daemons: list[subprocess.Popen] = []
        library = next((root / "usr/lib").glob("*/slurm-wlm"))
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        self.env["PATH"] = f"{root}/usr/bin:{root}/usr/sbin:{os.environ['PATH']}"
        self.env["LD_LIBRARY_PATH"] = f"{library.parent}:{library}"
        self.env["SLURM_CONF"] = str(folder / "slurm.conf")
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir()
        nodes = "\n".join(NODE.format(name, free_port()) for name in NODES)
        first = random.randrange(1, 10**6)  # decides on ports
        values = {"port": free_port(), "folder": folder, "plugins": library, "first": first}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**values, nodes=nodes))
        own = f"127.0.0.1 {platform.node()} {' '.join(NODES)}\n"
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + own)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)

    def start(self) -> None:
        own = {"key-file": "key", "log-file": "munged.log", "seed-file": "munge.seed"}
        own |= {"socket": "munge.sock", "pid-file": "munged.pid"}
        self.daemon("munged", *(f"--{k}={self.folder}/{v}" for k, v in own.items()), "--foreground")
        wait_for((self.folder / "munge.sock").exists)
        self.daemon("slurmctld", "-D")
        for name in NODES:
            script = DAEMON.format(self.folder, name, self.root)
            self.daemon("unshare", "-m", "--propagation", "private", "sh", "-c", script)
        wait_for(lambda: self("sinfo", "-h", "-o", "%D %t") == "2 idle")

    def daemon(self, *command: str) -> None:
        with open(self.folder / f"daemon {len(self.daemons)}.out", "w") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            self.daemons.append(subprocess.Popen(command, env=self.env, **options))
        LIVE.add(self.daemons[-1].pid)

    def __call__(self, *command: object, cwd: Path | None = None, **env: str) -> str:
        """Return what a command such as srun prints."""
        options = {"capture_output": True, "text": True, "timeout": 300, "cwd": cwd}
        done = subprocess.run([*map(str, command)], env={**self.env, **env}, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def end(self) -> None:
        for process in reversed(self.daemons):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            LIVE.discard(process.pid)
        left()


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    tools = [tool for tool in ("apt-get", "dpkg", "unshare", "mount") if not shutil.which(tool)]
    if sys.platform != "linux" or os.geteuid() or tools:
        pytest.skip("no SLURM: only as root on Debian, for the nodes' mount namespaces")
    if subprocess.run(["unshare", "-m", "--propagation", "private", "true"]).returncode:
        pytest.skip("no SLURM: unshare -m is not allowed")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path, for sockets
        Path(folder).chmod(0o755)  # munged wants its socket within reach of all
        slurm = Slurm(unpack(), Path(folder))
        try:
            slurm.start()
            yield slurm
            slurm("scancel", "--user", "root")
            wait_for(lambda: not children(LIVE))
        finally:
            slurm.end()


class Job:
    """slurm/train.sbatch, submitted with `options` in place of its header's."""

    def __init__(self, slurm: Slurm, folder: Path, flags: list, *options: str, **env: str) -> None:
        self.slurm = slurm
        command = ("sbatch", "--parsable", "--gpus-per-node", 0, "--cpus-per-task", 1, *options)
        self.number = slurm(*command, "slurm/train.sbatch", *flags, cwd=folder, **env)
        self.number += "_0" if "--array" in options else ""
        self.output = folder / f"slurm-{self.number}.out"

    def __getitem__(self, name: str) -> str:
        """Return what scontrol says of it, such as JobState."""
        said = self.slurm("scontrol", "show", "job", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", said))[name]

    @property
    def log(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def end(self, state: str, restarts: int) -> str:
        wait_for(lambda: self["JobState"] in ENDS, 180)
        assert (self["JobState"], self["Restarts"]) == (state, str(restarts)), self.log
        return self.log


@pytest.mark.timeout(300)
def test_stopped_and_requeued(slurm, project, few, tmp_path):
    """It saves and goes on at that step; srun with a task per rank ends with the same bits.

    A job that fails is started again, and goes on, but not for ever.
    """
    flags = [*SMALL["classification"], "--image-size", 32, "--epochs", 4, "--data", few]
    flags += ["--save-every", 1, "--resume", "never"]  # which is for the first start
    project.run(*flags, "--output-dir", tmp_path / "whole").ok()
    folder = project.planted(tmp_path / "the project", PLANTED).folder
    script = folder / "slurm/train.sbatch"
    script.write_text(script.read_text().replace("\nmax_failures=3 ", "\nmax_failures=1 "))
    common = {"PYTHON": sys.executable, "NPROC": "1"}

    def submit(name: str, *options: str, **env: str) -> Job:
        return Job(slurm, folder, flags, "--job-name", name, *options, **common, **env)

    stopped = submit("stopped", SLOW="")
    requeued = submit("requeued", "--array", "0", SLOW="")
    killed = submit("killed", "--nodes", "1", KILL="")
    wait_for(lambda: "epoch 1/" in stopped.log)
    slurm("scancel", "--signal", "USR1", stopped.number)  # as at the time limit
    wait_for(lambda: "epoch 1/" in requeued.log)
    slurm("scontrol", "requeue", requeued.number)

    tasks = ("srun", "--kill-on-bad-exit=1", "--nodes", 2, "--ntasks-per-node", 1)
    command = (*tasks, sys.executable, "main.py", *flags, "--output-dir", "runs/plain")
    assert "\n2 rank(s) on CPU" in slurm(*command, cwd=folder)

    assert "SIGUSR1: stopped and saved at epoch" in stopped.end("COMPLETED", restarts=1)
    assert "SIGTERM: stopped and saved at epoch" in requeued.end("COMPLETED", restarts=1)
    assert "/last.pt: " in stopped.log and "/last.pt: " in requeued.log
    names = ("runs/stopped", "runs/requeued-0", "runs/plain")
    assert {digest(folder / name) for name in names} == {digest(tmp_path / "whole")}

    found = re.findall(r"failure (\d) .*: status 137 on n\d\n", killed.end("FAILED", restarts=1))
    assert found == ["1", "2"]
    assert killed["ExitCode"] == "137:0"
    assert killed.log.count("/last.pt: 0 of 4 epochs done") == 1
