"""Takes the place of main.py: the ranks meet; rank 0 prints where it and its launcher listen."""

import os
from pathlib import Path

from ddpkit.ranks import process

process.install_handlers()
import torch  # noqa: E402

from ddpkit.ranks import distributed, failures  # noqa: E402


def sockets(pid: int) -> set[str]:
    links = (link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    return {os.readlink(link) for link in links}


def addresses() -> list[str]:
    """Return the addresses, as /proc writes them, of this process and its parent."""
    own = sockets(os.getpid()) | sockets(os.getppid())
    lines = (Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6"))
    fields = [line.split() for each in lines for line in each]
    listening = [row for row in fields if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return [row[1].split(":")[0] for row in listening]


with failures.one_line_errors():
    distributed.setup()
    distributed.reduce_tensor(torch.ones(1))
    distributed.say(os.environ["GLOO_SOCKET_IFNAME"])
    distributed.say(" ".join(sorted({*addresses()})))
    distributed.teardown()
