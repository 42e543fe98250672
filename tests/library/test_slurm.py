"""On a real SLURM: the ways to start, and slurm/train.sbatch.

Three virtual nodes on this machine, from Debian's packages, which are only unpacked. Each node has
a mount namespace of its own: nodes' names resolve in it, and one path is a disk of its own. Jobs
run side by side wherever they can: most of the time SLURM waits, for a requeue or a limit.
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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from digest import digest
from generated import LIVE, SMALL, Done, Project, children, left, wait_for
from ports import free_port

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(600)]

PACKAGES = (
    *("libhwloc15", "liblua5.1-0", "libmunge2", "munge"),
    *("slurm-client", "slurm-wlm-basic-plugins", "slurmctld", "slurmd"),
)
NODES = ("n1", "n2", "n3")
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
ReturnToService=2
KillWait=20
MinJobAge=3600
FirstJobId={first}
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""
NODE = "NodeName={} NodeHostname=localhost NodeAddr=127.0.0.1 Port={} CPUs=8 State=UNKNOWN"
DAEMON = """
mount --bind '{folder}/hosts' /etc/hosts && mount --bind '{folder}/disk.{name}' '{folder}/local'
while :; do
    [ -e '{folder}/{name} is lost' ] || slurmd -D -N {name} -d '{stepd}'
    sleep 0.2
done
"""
# SLOW_0 is how long each step of a job's first start sleeps; faults are in a start's second step.
PLANTED = """
import os, time
start, node = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ.get("SLURMD_NODENAME")
is_second = run.step == 1 + globals().setdefault("first step", run.step)
time.sleep(float(os.environ.get(f"SLOW_{start}", 0)))
if "KILL" in os.environ and is_second:
    os.kill(os.getpid(), 9)
if os.environ.get("RAISE") == f"{start} {rank}" and is_second:
    raise RuntimeError(f"uncorrectable ECC error on {node}")
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


def wait_until(condition: Callable[[], bool], seconds: float = 180) -> None:
    wait_for(lambda: time.sleep(0.4) or condition(), seconds)  # a question is a process


class Slurm:
    """A running SLURM; `local` is a path where each node has a disk of its own."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.local = folder, folder / "local"
        library = next((root / "usr/lib").glob("*/slurm-wlm"))
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        self.env["PATH"] = f"{root}/usr/bin:{root}/usr/sbin:{os.environ['PATH']}"
        self.env["LD_LIBRARY_PATH"] = f"{library.parent}:{library}"
        self.env["SLURM_CONF"] = str(folder / "slurm.conf")
        for name in (
            "state",
            "local",
            *(f"{kind}.{n}" for kind in ("spool", "disk") for n in NODES),
        ):
            (folder / name).mkdir()
        nodes = "\n".join(NODE.format(name, free_port()) for name in NODES)
        first = random.randrange(1, 10**6)  # decides on ports
        values = {"port": free_port(), "folder": folder, "plugins": library, "first": first}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**values, nodes=nodes))
        own = f"127.0.0.1 {platform.node()} {' '.join(NODES)}\n"
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + own)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        self.root, self.daemons = root, {}

    def start(self) -> None:
        folder = self.folder
        own = {"key-file": "key", "log-file": "munged.log", "seed-file": "munge.seed"}
        own |= {"socket": "munge.sock", "pid-file": "munged.pid"}
        self.daemon("munged", *(f"--{k}={folder}/{v}" for k, v in own.items()), "--foreground")
        wait_for((folder / "munge.sock").exists)
        self.daemon("slurmctld", "-D")
        stepd = f"{self.root}/usr/sbin/slurmstepd"
        for name in NODES:
            script = DAEMON.format(folder=folder, name=name, stepd=stepd)
            self.daemon("unshare", "-m", "--propagation", "private", "sh", "-c", script, name=name)
        wait_until(lambda: self("sinfo", "-h", "-o", "%D %t") == "3 idle")

    def daemon(self, *command: str, name: str = "") -> None:
        name = name or command[0]
        with open(self.folder / f"{name}.out", "w") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            self.daemons[name] = subprocess.Popen(command, env=self.env, **options)
        LIVE.add(self.daemons[name].pid)

    def run(self, *command: object, cwd: Path | None = None, **env: str) -> Done:
        """Run a command such as srun; without srun's own lines."""
        options = {"capture_output": True, "text": True, "timeout": 300, "cwd": cwd}
        done = subprocess.run([*map(str, command)], env={**self.env, **env}, **options)
        err = [x for x in done.stderr.splitlines() if not x.startswith(("srun:", "slurmst"))]
        return Done([done.returncode], done.stdout, "\n".join(err), [])

    def __call__(self, *command: object, **options: object) -> str:
        """Return what a command prints."""
        return self.run(*command, **options).ok().out.strip()

    def lose(self, node: str) -> None:
        """Kill all that runs on that node, as a power failure would."""
        (self.folder / f"{node} is lost").touch()
        mine, tasks = f"SLURMD_NODENAME={node}".encode(), {}
        for pid, parent in (found := children()).items():
            with contextlib.suppress(OSError):
                if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    tasks[pid] = parent
        daemon = [pid for pid, parent in found.items() if parent == self.daemons[node].pid]
        keepers = {*tasks.values()} - {*tasks, os.getpid()}  # who would tell of the tasks' end
        for pid in (*daemon, *keepers, *tasks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for process in reversed(self.daemons.values()):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            LIVE.discard(process.pid)
        left()


@pytest.fixture(scope="module")
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
        finally:
            slurm.end()


class Lab:
    """A copy of the project with what is planted, on the disk that all nodes share."""

    def __init__(self, slurm: Slurm, project: Project, folder: Path) -> None:
        self.slurm, self.project = slurm, project
        self.folder = project.planted(folder / "the project", PLANTED).folder
        self.data = project.draw(folder / "data", 24, 8)
        script = self.folder / "slurm/train.sbatch"
        script.write_text(script.read_text().replace("\nmax_failures=3 ", "\nmax_failures=2 "))
        more = ("--image-size", 32, "--epochs", 4)  # of six steps for one rank, three for two
        self.flags = [*SMALL["classification"], *more]
        self.env = {"PYTHON": sys.executable, "NPROC": "1"}

    def whole(self, ranks: int, *more: str) -> str:
        """Return the digest of a run that nothing disturbs; while no job runs."""
        out = self.folder / "runs" / f"whole of {ranks}"
        flags = ("--data", self.data, *self.flags, "--output-dir", out, *more)
        self.project.run(*flags, on=ranks).ok()
        return digest(out)

    def step(self, words: tuple) -> Done:
        """Run srun, without a batch script."""
        command = ("srun", "--kill-on-bad-exit=1", "--nodes", 2, *words, *self.flags)
        return self.slurm.run(*command, cwd=self.folder, **self.env)

    def submit(self, name: str, *options: object, flags: tuple = (), **env: str) -> "Job":
        """Submit slurm/train.sbatch with `options` in place of its header's."""
        cpu = ("--gpus-per-node", 0, "--cpus-per-task", 1)
        command = ("sbatch", "--parsable", "--job-name", name, *cpu, *options, "slurm/train.sbatch")
        words = [*command, "--data", self.data, *self.flags, *flags]
        number = self.slurm(*words, cwd=self.folder, **{**self.env, **env})
        return Job(self, number, self.folder / "runs" / name)


class Job:
    def __init__(self, lab: Lab, number: str, out: Path) -> None:
        self.lab, self.number, self.out = lab, number, out

    def __getitem__(self, name: str) -> str:
        """Return what scontrol says of it, such as JobState."""
        return dict(re.findall(r"(\w+)=(\S*)", self.control("show")))[name]

    def control(self, verb: str, *words: str) -> str:
        job = f"JobId={self.number}" if verb == "update" else self.number
        return self.lab.slurm("scontrol", verb, *(["job"] * (verb == "show")), job, *words)

    @property
    def nodes(self) -> list[str]:
        return self.lab.slurm("scontrol", "show", "hostnames", self["NodeList"]).split()

    @property
    def log(self) -> str:
        path = self.lab.folder / f"slurm-{self.number}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str, starts: int = 1) -> None:
        """Wait until the latest of so many starts has said `text`."""

        def is_said() -> bool:
            parts = self.log.split("starting ")
            if len(parts) > starts and text in parts[-1]:
                return True
            assert self["JobState"] not in ENDS, self.log
            return False

        wait_until(is_said)

    def end(self, state: str = "COMPLETED", restarts: int = 0) -> None:
        wait_until(lambda: self["JobState"] in ENDS)
        assert (self["JobState"], self["Restarts"]) == (state, str(restarts)), self.log


@pytest.fixture
def lab(slurm: Slurm, project: Project, tmp_path: Path) -> Iterator[Lab]:
    yield Lab(slurm, project, tmp_path)
    slurm("scancel", "--user", "root")
    wait_for(lambda: not children(LIVE))


def test_srun_and_a_lost_node(lab):
    """A task per node and a task per rank end with the same bits; so does a run without SLURM.

    So does a job that has lost a node: SLURM itself finds out, and starts it again on others.
    """
    slurm = lab.slurm
    lost = lab.submit("lost", "--nodes", 2, flags=("--save-every", 1), SLOW_0="1")
    lost.wait_for("epoch 1/")
    node = lost.nodes[1]
    slurm.lose(node)
    there = sorted({*NODES} - {node})
    local = slurm.local / "data"  # on one of the nodes only
    shutil.copytree(lab.data, slurm.folder / f"disk.{there[0]}/data")
    where = ("--nodelist", ",".join(there), "--ntasks-per-node", 1)
    launch, plain = ("./launch.sh",), (sys.executable, "main.py")
    tasks = [
        (*where, *start, "--output-dir", f"runs/{name}", "--data", data)
        for name, start, data in (
            ("launched", launch, lab.data),
            ("plain", plain, lab.data),
            ("absent", launch, local),
        )
    ]
    with ThreadPoolExecutor() as pool:
        *done, absent = pool.map(lab.step, tasks)
    lost.end(restarts=1)
    (slurm.folder / f"{node} is lost").unlink()
    for each in done:
        assert "\n2 rank(s) on CPU" in each.ok().out
    # Of both statuses, 2 and that of the task that srun killed, it has the higher one.
    first, *others = absent.err.splitlines()
    assert first.startswith(f"error: rank 1 on {there[1]}: {local}"), absent.err
    assert others in ([], [f"error: rank 1 on {there[1]} has failed"])
    assert absent.status
    assert lost.nodes == there
    assert "/last.pt: 1 of 4 epochs done" in lost.log
    names = ("launched", "plain", "lost")
    assert {digest(lab.folder / f"runs/{name}") for name in names} == {lab.whole(2)}, lost.log
    wait_until(lambda: slurm("sinfo", "-h", "-o", "%D %t") == "3 idle")


def test_stopped_and_requeued(lab):
    """By whatever stops a job: it saves, and goes on at that step; but not after scancel.

    After a failure it is started again, too.
    """
    slurm = lab.slurm
    one, never = ("--nodes", 1, "--nodelist"), ("--resume", "never")  # for the first start
    array = lab.submit("array", *one, "n1", "--array", "0-1", flags=never, SLOW_0="1")
    tasks = [Job(lab, f"{array.number}_{i}", array.out.with_name(f"array-{i}")) for i in range(2)]
    cancelled = lab.submit("cancelled", *one, "n2", SLOW_0="1")
    preempted = lab.submit("preempted", *one, "n3", flags=never, SLOW_0="1")

    tasks[0].wait_for("epoch 1/")
    tasks[0].control("requeue")
    tasks[1].wait_for("epoch 1/")
    slurm("scancel", "--signal", "USR1", tasks[1].number)
    preempted.wait_for("epoch 1/")
    other = ("--partition", "high", "--exclusive", "--output", "/dev/null", "--wrap", "sleep 2")
    slurm("sbatch", *one, "n3", *other)
    cancelled.wait_for("epoch 1/")
    asked_at = time.time()
    slurm("scancel", cancelled.number)
    preempted.wait_for("JPEG", starts=2)

    slurm("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test")  # no more jobs there
    more = {"flags": ("--save-every", 1), "SLOW_0": "5", "RAISE": "1 1"}
    limited = lab.submit("limited", "--nodes", 2, "--time", 60, **more)
    limited.wait_for("JPEG")
    # SLURM sends the signal within 30 s, as the header has --signal USR1@300.
    minutes = int(limited["RunTime"].split(":")[1]) + 5
    limited.control("update", f"TimeLimit={minutes}")
    limited.wait_for("SIGUSR1: stopped and saved")
    limited.control("update", "TimeLimit=60")
    limited.end(restarts=2)
    slurm("scontrol", "update", "NodeName=n3", "State=RESUME")
    assert limited.log.count("RuntimeError: uncorrectable ECC error on n") == 1
    failures = re.findall(r"failure (\d) \(max_failures=2\): status \d+ on n\[1-2\]\n", limited.log)
    assert failures == ["1"]
    first, second = re.findall("/last.pt: (.*)", limited.log)
    assert first != second

    cancelled.end("CANCELLED")
    assert (cancelled.out / "last.pt").stat().st_mtime > asked_at
    for job, name in ((tasks[0], "TERM"), (tasks[1], "USR1"), (preempted, "TERM")):
        job.end(restarts=1)
        assert f"SIG{name}: stopped and saved at epoch" in job.log, job.log
        assert "/last.pt: " in job.log, job.log
    assert digest(limited.out) == lab.whole(2)
    assert {digest(job.out) for job in (*tasks, preempted)} == {lab.whole(1, *never)}


def test_failures(lab):
    """Each is followed by another start, a bounded number of times; but not a mistake."""
    slurm = lab.slurm
    killed = lab.submit("killed", "--nodes", 1, KILL="")
    out = slurm.local / "out"  # not shared
    apart = lab.submit("apart", "--nodes", 1, flags=("--output-dir", out), SLOW_0="0.7")
    apart.wait_for("epoch 1/")
    first = apart.nodes[0]
    apart.control("requeue")
    apart.control("update", f"ExcNodeList={first}")

    apart.end("FAILED", restarts=1)
    assert apart["ExitCode"] == "2:0"
    (refusal,) = (line for line in apart.log.splitlines() if line.startswith("error:"))
    assert f"on {first}" in refusal and refusal.endswith("[environment.check_new]")
    assert not [*(slurm.folder / f"disk.{apart.nodes[0]}").glob("out/*.pt")]

    killed.end("FAILED", restarts=2)  # it begins anew, as it has nothing to lose
    assert killed["ExitCode"] == "137:0"
    found = re.findall(r"failure (\d) .*: status 137 on n\d\n", killed.log)
    assert found == ["1", "2", "3"], killed.log
