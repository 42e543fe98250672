"""A real SLURM of three virtual nodes on this host, from Debian's packages, which it only unpacks.

Each node has a mount namespace of its own: the nodes' names resolve in it, and one path is a disk
of its own.
"""

import contextlib
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from running import ENVIRONMENT, Done, marked

PACKAGES = (
    *("libhwloc15", "liblua5.1-0", "libmunge2", "munge"),
    *("slurm-client", "slurm-wlm-basic-plugins", "slurmctld", "slurmd"),
)
NODES = ("n1", "n2", "n3")
CPUS = 8  # of each node, as far as SLURM knows
KILL_WAIT = 20  # seconds from SIGTERM to SIGKILL
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait={kill_wait}
MinJobAge=3600
FirstJobId={first}
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why SLURM cannot be started on this machine, or ""."""
    if platform.system() != "Linux":
        return "only on Linux"
    if os.geteuid():
        return "only as root, for the nodes' mount namespaces"
    for tool in ("apt-get", "dpkg", "unshare", "mount"):
        if not shutil.which(tool):
            return f"there is no {tool}"
    done = subprocess.run(["unshare", "-m", "--propagation", "private", "true"], check=False)
    return "unshare -m is not allowed" if done.returncode else ""


def unpack() -> Path:
    """Return the folder into which the packages are unpacked, once for each kind of machine."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = home / "ddp-template" / f"slurm-{platform.machine()}"
    if root.is_dir():
        return root
    parts = root.with_name(f"{root.name}-{uuid.uuid4().hex}")
    parts.mkdir(parents=True)
    try:
        _download(parts)
        for package in parts.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, parts / "root"], check=True)
        for path in (parts / "root/usr/sbin").glob("slurm*-wlm"):
            path.with_name(path.name.removesuffix("-wlm")).symlink_to(path.name)
        with contextlib.suppress(OSError):  # another process has done the same meanwhile
            (parts / "root").rename(root)
    finally:
        shutil.rmtree(parts)
    return root


def _download(folder: Path) -> None:
    command = ["apt-get", "--quiet", "download", *PACKAGES]
    for _ in range(2):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode == 0:
            return
        subprocess.run(["apt-get", "--quiet", "update"], capture_output=True, timeout=300)
    pytest.skip(f"no SLURM: {done.stderr.strip().splitlines()[-1]}")


class Slurm:
    """A running SLURM; `local` is a path where each node has a disk of its own."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.local = folder, folder / "local"
        self.mark = uuid.uuid4().hex  # in the environment of all that belongs to it
        library = next((root / "usr/lib").glob("*/slurm-wlm"))
        tools = [str(root / "usr/bin"), str(root / "usr/sbin"), os.environ["PATH"]]
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
            **ENVIRONMENT,
            "PATH": ":".join(tools),
            "LD_LIBRARY_PATH": f"{library.parent}:{library}",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "DDP_TEMPLATE_TEST": self.mark,
        }
        self.slurmstepd = root / "usr/sbin/slurmstepd"
        self.daemons: dict[str, subprocess.Popen] = {}
        for name in ("run", "log", "state", "local", *(f"spool.{n}" for n in NODES)):
            (folder / name).mkdir(parents=True)
        self._configure(library)

    def _configure(self, plugins: Path) -> None:
        folder = self.folder
        values = {"port": free_port(), "folder": folder, "plugins": plugins}
        values |= {"kill_wait": KILL_WAIT, "first": random.randrange(1, 10**6)}  # decides on ports
        lines = CONFIGURATION.format(**values).splitlines()
        for name in NODES:
            self.disk(name).mkdir()
            where = f"NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()}"
            lines.insert(-2, f"NodeName={name} {where} CPUs={CPUS} State=UNKNOWN")
        (folder / "slurm.conf").write_text("\n".join([*lines, ""]))
        own = f"127.0.0.1 {platform.node()} {' '.join(NODES)}\n"
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + own)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)

    def disk(self, node: str) -> Path:
        """Return where that node's own disk is for this process."""
        return self.folder / f"disk.{node}"

    def start(self) -> None:
        run = self.folder / "run"
        own = {"key-file": self.folder / "munge.key", "log-file": self.folder / "log/munged.log"}
        own |= {"socket": run / "munge.sock", "pid-file": run / "munged.pid"}
        own["seed-file"] = run / "munge.seed"
        self._daemon("munged", "munged", "--foreground", *(f"--{k}={v}" for k, v in own.items()))
        wait_until(own["socket"].exists, "munged")
        self._daemon("slurmctld", "slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: self("sinfo", "-h", "-o", "%D %t") == "3 idle", "all nodes", 60)

    def start_node(self, name: str) -> None:
        binds = (self.folder / "hosts", "/etc/hosts"), (self.disk(name), self.local)
        script = "".join(f"mount --bind '{here}' '{there}' && " for here, there in binds)
        script += f"exec slurmd -D -N {name} -d '{self.slurmstepd}'"
        self._daemon(name, "unshare", "-m", "--propagation", "private", "sh", "-c", script)

    def _daemon(self, name: str, *command: str) -> None:
        with open(self.folder / f"log/{name}.out", "a") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def run(self, *command: object, cwd: Path | None = None, **env: str) -> Done:
        """Run a command such as srun."""
        words = [str(word) for word in command]
        options = {"capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(words, cwd=cwd, env={**self.env, **env}, **options)
        return Done(done.returncode, done.stdout, done.stderr, [])

    def __call__(self, *command: object, **options: Any) -> str:
        """Return what a command prints."""
        return self.run(*command, **options).ok().out.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what scontrol says of a job, such as JobState and Restarts."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", number)))

    def processes(self, node: str) -> list[int]:
        """Return the ids of the tasks' processes that run on that node."""
        return [pid for pid in marked(self.mark) if environ(pid).get("SLURMD_NODENAME") == node]

    def lose(self, node: str) -> None:
        """Kill all that runs on that node, as a power failure would."""
        tasks = self.processes(node)
        self.daemons[node].kill()
        self.daemons[node].wait()
        for pid in (*keepers(tasks), *tasks):  # who would tell of the tasks' end comes first
            kill(pid)

    def end(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self("scancel", "--user", "root")
            wait_until(lambda: not self("squeue", "-h"), "the jobs' end", KILL_WAIT + 10)
        for process in reversed(self.daemons.values()):
            process.terminate()
        for process in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        left = marked(self.mark)
        for pid in (*keepers(left), *left):
            kill(pid)


def keepers(pids: list[int]) -> set[int]:
    """Return the ids of those slurmstepds, which lose their environment, that watch over `pids`."""
    found = set()
    for parent in map(parent_of, pids):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd"):
                found.add(parent)
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def environ(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return {}


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.5)


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """Start SLURM; skip the test where that cannot be done. At the end nothing of it is left."""
    if why := missing():
        pytest.skip(f"no SLURM: {why}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path, for sockets
        Path(folder).chmod(0o755)  # munged wants its socket within reach of all
        slurm = Slurm(unpack(), Path(folder))
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.end()
