"""A real SLURM of two virtual nodes on this machine, from Debian's packages, only unpacked.

Each node has a mount namespace of its own, in which the nodes' names resolve. Jobs run side by
side: most of the time SLURM waits, for a requeue.
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

from generated import LEAN, LIVE, children, left, texts, wait_for
from ports import free_port

PACKAGES = (
    "libhwloc15 liblua5.1-0 libmunge2 munge "
    "slurm-client slurm-wlm-basic-plugins slurmctld slurmd"
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
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={} NodeHostname=localhost NodeAddr=127.0.0.1 Port={} CPUs=8 State=UNKNOWN"
)
DAEMON = "mount --bind '{}/hosts' /etc/hosts && exec slurmd -D -N {} -d '{}/usr/sbin/slurmstepd'"
ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class NoSlurmError(Exception):
    """Why there can be none on this machine."""


def unpack() -> Path:
    """Return the folder into which the packages are unpacked, once for each kind of machine."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = home / "ddp-template" / f"slurm-{platform.machine()}"
    if root.is_dir():
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    get = f"apt-get --quiet download {PACKAGES}"
    get = f"{get} || {{ apt-get --quiet update && {get}; }}"
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        parts = Path(folder)
        options = {"shell": True, "capture_output": True, "timeout": 600}
        if subprocess.run(get, cwd=parts, **options).returncode:
            raise NoSlurmError("its packages cannot be downloaded")
        for package in parts.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, parts / "root"], check=True)
        for path in (parts / "root/usr/sbin").glob("slurm*-wlm"):
            path.with_name(path.name.removesuffix("-wlm")).symlink_to(path.name)
        # another process has done the same meanwhile
        with contextlib.suppress(OSError):
            (parts / "root").rename(root)
    return root


class Slurm:
    """A running SLURM."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.daemons: list[subprocess.Popen] = []
        library = next((root / "usr/lib").glob("*/slurm-wlm"))
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        self.env["PATH"] = f"{root}/usr/bin:{root}/usr/sbin:{os.environ['PATH']}"
        self.env["LD_LIBRARY_PATH"] = f"{library.parent}:{library}"
        self.env["SLURM_CONF"] = str(folder / "slurm.conf")
        self.env.setdefault("PYTHONPATH", LEAN)
        (folder / "state").mkdir()
        for node in NODES:
            (folder / f"spool.{node}").mkdir()
        nodes = "\n".join(NODE.format(name, free_port()) for name in NODES)
        text = CONFIGURATION.format(
            port=free_port(),
            folder=folder,
            plugins=library,
            first=random.randrange(1, 10**6),  # decides on ports
            nodes=nodes,
        )
        (folder / "slurm.conf").write_text(text)
        own = f"127.0.0.1 {platform.node()} {' '.join(NODES)}\n"
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + own)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)

    def start(self) -> None:
        own = {"key-file": "key", "log-file": "munged.log", "seed-file": "munge.seed"}
        own |= {"socket": "munge.sock", "pid-file": "munged.pid"}
        flags = [f"--{name}={self.folder}/{file}" for name, file in own.items()]
        self.daemon("munged", flags, "--foreground")
        wait_for((self.folder / "munge.sock").exists)
        self.daemon("slurmctld", "-D")
        for name in NODES:
            script = DAEMON.format(self.folder, name, self.root)
            self.daemon("unshare", "-m", "--propagation", "private", "sh", "-c", script)
        wait_for(lambda: self("sinfo", "-h", "-o", "%D %t") == "2 idle")

    def daemon(self, *command: object) -> None:
        with open(self.folder / f"daemon {len(self.daemons)}.out", "w") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            process = subprocess.Popen(texts(command), env=self.env, **options)
        self.daemons.append(process)
        LIVE.add(process.pid)

    def __call__(self, *command: object, cwd: Path | None = None, **env: str) -> str:
        """Return what a command such as srun prints."""
        options = {"capture_output": True, "text": True, "timeout": 300, "cwd": cwd}
        done = subprocess.run(texts(command), env=self.env | env, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def end(self) -> None:
        for process in reversed(self.daemons):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            LIVE.discard(process.pid)
        left()


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """A SLURM, until the block ends; NoSlurmError says why there can be none."""
    has_tools = all(map(shutil.which, ("apt-get", "dpkg", "unshare", "mount")))
    if sys.platform != "linux" or os.geteuid() or not has_tools:
        raise NoSlurmError("only as root on Debian, for the nodes' mount namespaces")
    if subprocess.run(["unshare", "-m", "--propagation", "private", "true"]).returncode:
        raise NoSlurmError("unshare -m is not allowed")
    # short, for sockets
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
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

    def __init__(
        self, slurm: Slurm, folder: Path, flags: list, *options: str, **env: str
    ) -> None:
        self.slurm = slurm
        command = ["sbatch", "--parsable", "--gpus-per-node", 0, "--cpus-per-task", 1]
        script = "slurm/train.sbatch"
        self.number = slurm(command, options, script, flags, cwd=folder, **env)
        self.number += "_0" if "--array" in options else ""
        self.output = folder / f"slurm-{self.number}.out"

    def __getitem__(self, name: str) -> str:
        """Return what scontrol says of it, such as JobState."""
        said = self.slurm("scontrol", "show", "job", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", said))[name]

    def is_over(self) -> bool:
        return self["JobState"] in ENDS

    @property
    def log(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def end(self, state: str, restarts: int) -> str:
        wait_for(self.is_over, 180)
        assert self["JobState"] == state, self.log
        assert self["Restarts"] == str(restarts), self.log
        return self.log
