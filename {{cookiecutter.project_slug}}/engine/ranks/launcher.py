"""What launch.sh starts: a process of main.py for each rank of this node, and an end as theirs.

It takes a script and its flags, gives each rank torchrun's variables, passes signals on to all of
them, and exits as the rank that failed first, whose error is the last line. MAX_RESTARTS says how
often they are started again, to go on from the last checkpoint. It imports no torch.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from engine.errors import UserError, no_torch, print_error
from engine.ranks import environment, process, protocol
from engine.ranks.environment import Nodes

POLL = 0.05  # seconds between two looks at the ranks


class Ranks:
    """The ranks of this node, which get all signals that this process gets."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.running: list[subprocess.Popen] = []
        self.first, self.first_at = 0, 0.0  # the signal that came first, and when
        self.sent: set[int] = set()
        self.kill_at = math.inf
        for signum in protocol.STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self.on_signal)

    def start(self, words: Sequence[str], folder: str) -> None:
        """Start a Python with `words` for each rank; they meet in a new file of `folder`."""
        nodes = self.nodes
        same: dict[str, object] = {
            **{"LOCAL_WORLD_SIZE": nodes.ranks, "WORLD_SIZE": nodes.count * nodes.ranks},
            **{"MASTER_ADDR": nodes.host, "MASTER_PORT": nodes.port},
            protocol.LAUNCHER: os.getpid(),
        }
        if nodes.count == 1:
            same[protocol.STORE] = f"{folder}/{uuid.uuid4().hex}"
        self.running, self.kill_at = [], math.inf
        for local_rank in range(nodes.ranks):
            own = {"LOCAL_RANK": local_rank, "RANK": nodes.number * nodes.ranks + local_rank}
            env = os.environ | {name: str(value) for name, value in {**same, **own}.items()}
            command = [sys.executable, "-u", *words]
            self.running.append(subprocess.Popen(command, env=env, start_new_session=True))
        if self.first:
            self.send(self.first)

    def on_signal(self, signum: int, _: object) -> None:
        now = time.monotonic()
        is_new = now > self.first_at + protocol.DUPLICATE_SECONDS
        if not self.first:
            self.first, self.first_at = signum, now
            self.kill_at = now + protocol.STOP_SECONDS
        elif signum == self.first == signal.SIGINT and is_new:
            self.kill_at = min(self.kill_at, now + 5)  # a rank that is held does not exit by itself
        self.send(signum)

    def send(self, signum: int) -> None:
        self.sent.add(signum)
        for rank in self.running:
            for each in (signum, signal.SIGCONT):  # wake a rank that SIGSTOP holds
                if rank.returncode is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                        os.killpg(rank.pid, each)

    def wait(self) -> int:
        """Return the exit status of the rank that failed first, or 0, once all have ended."""
        failed: tuple[int, int] | None = None
        while None in (statuses := [rank.poll() for rank in self.running]):
            if any(statuses) and not failed:
                failed = find_first([rank.poll() for rank in self.running])
                self.kill_at = min(self.kill_at, time.monotonic() + protocol.NOTICE_SECONDS)
                self.send(signal.SIGTERM)
            if time.monotonic() > self.kill_at:
                self.kill()
            time.sleep(POLL)
        return self.explain(*(failed or find_first(statuses)))

    def kill(self) -> None:
        self.kill_at = math.inf
        self.send(signal.SIGKILL)
        if self.first:
            name, seconds = signal.Signals(self.first).name, time.monotonic() - self.first_at
            print_error(f"the ranks had not ended {seconds:.0f} s after {name} and were killed")

    def explain(self, local_rank: int, status: int) -> int:
        """Return the exit status for that of a rank; name one that a signal has ended."""
        if status >= 0:
            return status
        if self.first and -status in self.sent:
            return 128 + self.first
        name, pid = signal.Signals(-status).name, self.running[local_rank].pid
        hint = ": out of memory?" if name == "SIGKILL" else ""
        place = f" on {environment.node()}" if self.nodes.count > 1 else ""
        rank = self.nodes.number * self.nodes.ranks + local_rank
        print_error(f"rank {rank} (process {pid}){place} was ended by {name}{hint}")
        return 128 - status


def find_first(statuses: Sequence[int | None]) -> tuple[int, int]:
    """Return (rank, status) of the rank that made the others fail; (0, 0) if none has failed.

    That is one that crashed, even if another rank noticed it and exited first; but a mistake before
    what nccl makes of it, which aborts the ranks that it leaves behind.
    """
    failed = [(rank, status) for rank, status in enumerate(statuses) if status]

    def order(each: tuple[int, int]) -> tuple[bool, bool]:
        is_crash = each[1] < 0 and each[1] != -signal.SIGTERM
        return each[1] != protocol.MISTAKE, not is_crash

    return min(failed, key=order, default=(0, 0))


def read_restarts(nodes: Nodes) -> int:
    text = os.environ.get("MAX_RESTARTS") or "0"
    if not text.isdecimal():
        raise UserError(f"MAX_RESTARTS={text} is not an integer of 0 or more")
    if text != "0" and nodes.count > 1:
        raise UserError(f"MAX_RESTARTS={text} is for one node: slurm/train.sbatch restarts several")
    return int(text)


def main() -> int:
    process.be_quiet()
    try:
        if line := no_torch():
            raise UserError(line)
        nodes = environment.read_nodes()
        restarts = read_restarts(nodes)
    except UserError as error:
        print_error(error)
        environment.note_mistake()
        return protocol.MISTAKE
    if not os.environ.get("OMP_NUM_THREADS"):  # main.py sets the threads
        os.environ.update({"OMP_NUM_THREADS": "1", protocol.THREADS: "auto"})
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    os.environ.setdefault(protocol.LAUNCH_ID, uuid.uuid4().hex)
    script, *words = sys.argv[1:]
    if words[:1] == ["-m"]:  # and a module, in place of main.py
        script, *words = words
    if "--check" in words:
        script = str(Path(script).with_name("preflight.py"))
    if nodes.number == 0:
        with contextlib.suppress(OSError):  # a closed pipe
            print(f"starting {nodes.count * nodes.ranks} rank(s) ...", flush=True)
    ranks = Ranks(nodes)
    with tempfile.TemporaryDirectory(prefix="ddp-", ignore_cleanup_errors=True) as folder:
        while True:
            ranks.start([script, *words], folder)
            status = ranks.wait()
            if status in protocol.FINAL or not restarts or ranks.first:
                process.ignore_signals()
                return status
            restarts -= 1
            print(f"restarting; MAX_RESTARTS is {restarts} now", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
