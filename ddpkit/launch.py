"""Usage: [NAME=value ...] ./launch.sh [flags of main.py]
       [NAME=value ...] python -m ddpkit launch SCRIPT [its flags]
       [NAME=value ...] python -m ddpkit launch -m MODULE [its flags]

Starts a process of main.py, SCRIPT or MODULE for each GPU of this machine, or
two if it has no GPU. On a Mac it starts one, on Apple's GPU; several processes
use the CPU.

  NPROC           processes on this node   (default: one per GPU, else 2)
  NNODES          number of nodes          (default: 1)
  NODE_RANK       this node, from 0        (required if NNODES > 1)
  MASTER_ADDR     address of node 0        (required if NNODES > 1)
  MASTER_PORT     free port on node 0      (default: 29500; on one node any)
  PYTHON          interpreter              (default: python, else python3)
  MAX_RESTARTS    restarts after a failure, from last.pt  (default: 0)
  OMP_NUM_THREADS CPU threads per process  (default: its share of the CPUs; with
                                           GPUs at most 4)

Under SLURM's srun, one task per node, omit NNODES, NODE_RANK, MASTER_ADDR and
MASTER_PORT. NPROC must be the same on all nodes; MAX_RESTARTS works on one node
only.

Exit status: 0 done, 75 stopped by a signal and saved, 2 usage error, else a
failure.

One node:        ./launch.sh --epochs 90
Two of its GPUs: CUDA_VISIBLE_DEVICES=0,1 ./launch.sh
CPU only:        CUDA_VISIBLE_DEVICES= ./launch.sh
Two nodes:       NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 ./launch.sh     on node0
                 NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 ./launch.sh     on node1
SLURM:           srun --nodes 2 --ntasks-per-node 1 --cpus-per-task 32 \\
                      --gpus-per-node 8 ./launch.sh
"""

# Each rank has torchrun's variables and gets all signals that this process gets; it
# exits as the rank that failed first. MAX_RESTARTS starts them again. This module
# imports no torch.

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence

from ddpkit.errors import UserError, guard_streams, no_torch, print_error, print_line
from ddpkit.ranks import environment, process, protocol
from ddpkit.ranks.environment import Nodes

POLL = 0.05  # seconds between two looks at the ranks
# removes a folder once this process has ended, also if a debugger kills it and the ranks
REMOVE = 'exec 3<&0; (cat <&3; rm -rf "$0") > /dev/null 2>&1 &'
HINTS = {
    "SIGKILL": ": out of memory?",
    "SIGABRT": ": if gloo printed an error, ranks called different collectives or shapes",
}


class Ranks:
    """The ranks of this node."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.running: list[subprocess.Popen] = []
        self.first = 0  # the signal that came first
        self.first_at = 0.0
        self.sent: set[int] = set()
        self.kill_at = math.inf
        for signum in protocol.STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self.on_signal)

    def start_all(self, words: Sequence[str], store: str) -> None:
        """Start a Python with `words` for each rank; those of one node meet in the file `store`."""
        nodes = self.nodes
        env = os.environ | {
            protocol.LAUNCHER: str(os.getpid()),
            "MASTER_ADDR": nodes.host,
            "MASTER_PORT": str(nodes.port if nodes.count > 1 else free_port()),
            "LOCAL_WORLD_SIZE": str(nodes.ranks),
            "WORLD_SIZE": str(nodes.count * nodes.ranks),
        }
        env.pop("PYTHONSAFEPATH", None)  # or main.py would not find the files beside it
        if nodes.count == 1:
            env[protocol.STORE] = store
        self.running = []
        self.kill_at = math.inf
        for local_rank in range(nodes.ranks):
            env["LOCAL_RANK"] = str(local_rank)
            env["RANK"] = str(nodes.number * nodes.ranks + local_rank)
            command = [sys.executable, "-u", *words]
            # a session of its own, so that Ctrl-C comes from here alone
            own = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # on Windows
            with process.holding_signals({signal.SIGINT}):  # until it can be quiet
                rank = subprocess.Popen(
                    command, env=env, start_new_session=True, creationflags=own
                )
                self.running.append(rank)
        if self.first:  # it came before all were there
            self.send(self.first)

    def on_signal(self, signum: int, _: object) -> None:
        if not self.first:
            self.first = signum
            self.first_at = time.monotonic()
            self.kill_at = self.first_at + protocol.STOP_SECONDS
        self.send(signum)

    def send(self, signum: int) -> None:
        """Send a signal that ends the ranks, and wake those that SIGSTOP holds."""
        self.sent.add(signum)
        for rank in self.running:
            # one that has been waited for: its number may be another process's
            if rank.returncode is not None:
                continue
            with contextlib.suppress(OSError):  # it has ended
                if sys.platform == "win32":  # where these are all that there is
                    if signum == protocol.KILL:
                        rank.kill()
                    else:
                        rank.send_signal(signal.CTRL_BREAK_EVENT)
                    continue
                # A request to stop is for the rank: it needs the processes that it has
                # started until then.
                is_request = self.first and signum != protocol.KILL
                kill = os.kill if is_request else os.killpg
                kill(rank.pid, signum)
                os.killpg(rank.pid, signal.SIGCONT)

    def wait(self) -> int:
        """Return the exit status of the rank that failed first, or 0, once all have ended."""
        failed: tuple[int, int] | None = None
        statuses = self.poll()
        while None in statuses:
            # One has failed: the others, which may wait for it, have half a minute to end.
            if any(statuses) and not failed:
                # asked again: a mistake of another rank may have come to light since
                failed = find_first(self.poll())
                notice = time.monotonic() + protocol.NOTICE_SECONDS
                self.kill_at = min(self.kill_at, notice)
                self.send(signal.SIGTERM)
            if time.monotonic() > self.kill_at:
                self.kill_at = math.inf
                self.send(protocol.KILL)
                if self.first:
                    name = signal.Signals(self.first).name
                    seconds = time.monotonic() - self.first_at
                    print_error(
                        f"the ranks did not exit within {seconds:.0f} s of {name} and were killed"
                    )
            time.sleep(POLL)
            statuses = self.poll()
        local_rank, status = failed or find_first(statuses)
        return self.exit_status(local_rank, status)

    def poll(self) -> list[int | None]:
        """Return the exit status of each rank, None while it runs."""
        return [rank.poll() for rank in self.running]

    def exit_status(self, local_rank: int, status: int) -> int:
        """Return the exit status for that of a rank; name one that a signal has ended."""
        is_sent = -status in self.sent or (
            sys.platform == "win32" and status in protocol.OF_SIGNALS
        )
        if self.first and is_sent:  # it has ended as it was told to
            return 128 + self.first
        where = f" on {environment.node()}" if self.nodes.count > 1 else ""
        number = self.nodes.number * self.nodes.ranks + local_rank
        rank = f"rank {number} (process {self.running[local_rank].pid}){where}"
        if status < 0:
            name = signal.Signals(-status).name
            print_error(f"{rank} was killed by {name}{HINTS.get(name, '')}")
            return 128 - status
        # With 1 Python ends after a traceback, and ddpkit after a line.
        if status not in {1, *protocol.FINAL}:
            print_error(f"{rank} exited with status {status}")
        return status


def free_port() -> int:
    """Return a port for ranks of one node that do not meet in a file: no other run's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def find_first(statuses: Sequence[int | None]) -> tuple[int, int]:
    """Return (rank, status) of the rank that made the others fail; (0, 0) if none has failed."""

    def order(end: tuple[int, int]) -> tuple[bool, bool]:
        # a mistake, then one that a signal has ended, then the others: they missed it
        _, status = end
        return status != protocol.MISTAKE, status > 0 or status == -signal.SIGTERM

    failed = [(rank, status) for rank, status in enumerate(statuses) if status]
    return min(failed, key=order, default=(0, 0))


def main(command: Sequence[str] = ()) -> int:
    """Start the ranks of `command`, a script and its flags; return the exit status.

    By default the script is the project's main.py, and the flags are those of this process.
    """
    guard_streams()
    words = list(command or sys.argv[1:])
    if words[:1] in (["-h"], ["--help"]):
        print_line(__doc__.rstrip(), sys.stdout)
        return 0
    process.be_quiet()
    try:
        if not command:
            words.insert(0, str(process.project() / "main.py"))
        elif words[0] != "-m" and not os.path.isfile(words[0]):
            raise UserError(
                f"python -m ddpkit launch {words[0]}: no such script (NPROC=2 for two ranks)"
            )
        line = no_torch()
        if line:
            raise UserError(line)
        nodes = environment.read_nodes()
    except UserError as error:
        print_error(error)
        environment.note_mistake()
        return protocol.MISTAKE
    if not os.environ.get("OMP_NUM_THREADS"):  # main.py sets the threads
        os.environ.update({"OMP_NUM_THREADS": "1", protocol.THREADS: "auto"})
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    os.environ.setdefault(protocol.LAUNCH_ID, uuid.uuid4().hex)
    ranks = Ranks(nodes)
    restarts = nodes.restarts
    private = tempfile.TemporaryDirectory(prefix="ddp-", ignore_cleanup_errors=True)
    with private as folder:
        if process.is_debugged() and os.name == "posix":
            remover = subprocess.Popen(  # its input is open as long as this lives
                ["sh", "-c", REMOVE, folder],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            remover.wait()
        while True:
            # each time another file: what is in the last one is of ranks that are gone
            ranks.start_all(words, f"{folder}/store {restarts}")
            status = ranks.wait()
            if status in protocol.FINAL or not restarts or ranks.first:
                process.ignore_signals()  # while the folder is removed
                return status
            restarts -= 1
            print_line(f"restarting; MAX_RESTARTS is now {restarts}", sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
