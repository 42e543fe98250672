"""How the launchers of several nodes agree: to start, to start again, or to end.

Before each start they meet at MASTER_PORT, where node 0's launcher holds a store as long as it
lives. What they agree on does not depend on how often each has started before.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.utils.distributed import get_free_port

from engine.errors import UserError
from engine.ranks import environment, joining, protocol, reaching
from engine.ranks.environment import Nodes

BACKEND = "launch.sh"  # torchrun's name for what follows
START_SECONDS = 60  # for torchrun on all nodes, once their launchers have met
LINGER_SECONDS = 10  # for them to end once all are asked to stop
ALONE_SECONDS = 20  # for the ranks of this node to end by themselves once another's have failed
END_SECONDS = 45  # for the ranks of all nodes to end; torchrun kills them after 30


class Agreement(RendezvousHandler):
    """What the launchers have agreed on for one start, as torchrun asks for it.

    restarts: how many are left, the least of all nodes'
    launch_id: of the first start
    """

    def __init__(self, nodes: Nodes, meeting: joining.Meeting, notes: list[dict]) -> None:
        self.nodes, self.store, self.name = nodes, meeting.store, meeting.name
        self.store.set_timeout(timedelta(seconds=START_SECONDS))
        self.ports = nodes.host, notes[0]["port"]  # of the ranks' store, which rank 0 holds
        self.restarts = min(note["restarts"] for note in notes)
        begun = [note for note in notes if note["launch_id"]]
        begun.sort(key=lambda note: note["restarts"])
        self.launch_id = begun[0]["launch_id"] if begun else self.name

    def _create(self, _: RendezvousParameters) -> RendezvousHandler:
        return self

    def flags(self) -> list[str]:
        """Return torchrun's flags, with which it asks this."""
        rendezvous_handler_registry.register(BACKEND, self._create)
        nodes = f"--nnodes={self.nodes.count}"
        return [nodes, f"--rdzv-backend={BACKEND}", f"--rdzv-id={self.name}"]

    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.PrefixStore("torchrun", self.store)
        ranks = RendezvousStoreInfo(*self.ports)
        return RendezvousInfo(store, self.nodes.number, self.nodes.count, ranks)

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self.name

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    @contextlib.contextmanager
    def watching(self, end_ranks: Callable[[str], None]) -> Iterator[None]:
        """Within the block call `end_ranks` if the ranks of another node fail and these go on.

        Ranks that wait for others to come, or in a collective of nccl's, do not notice that.
        """
        is_over = threading.Event()

        def look() -> None:
            with contextlib.suppress(dist.DistError):  # node 0's launcher has ended
                while not self.store.check(["failed"]):
                    if is_over.wait(1):
                        return
                if not is_over.wait(ALONE_SECONDS):
                    end_ranks(self.store.get("failed").decode())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(LINGER_SECONDS)  # in the store when Python ends, it would abort the process

    def tell_failure(self, status: int) -> None:
        """Tell the launchers of the other nodes that this node's ranks have failed."""
        with contextlib.suppress(dist.DistError):
            self.store.set("failed", self._end(status))
            time.sleep(0 if self.nodes.number else 2)  # here is the store: let the others read it

    def _end(self, status: int) -> str:
        return f"node {self.nodes.number} ({environment.node()}) has ended with status {status}"

    def settle(self, status: int, seconds: float = END_SECONDS) -> str:
        """Return why not to start again, "" if all do; for the launchers of all nodes alike.

        status: of this node's ranks. seconds: how long to wait for the other nodes' to end.
        """
        number, count = self.nodes.number, self.nodes.count
        mine = self._end(status) if status in protocol.FINAL else ""
        ends = [f"end {i}" for i in range(count)]
        try:
            self.store.set(ends[number], mine)
            if number:
                if not mine and joining.has(self.store, ["verdict"], seconds + 15):
                    mine = self.store.get("verdict").decode()
                return mine
            joining.has(self.store, ends, 0.1 if mine else seconds)
            said = [self.store.get(end).decode() for end in ends if self.store.check([end])]
            verdict = next(filter(None, said), "")
            self.store.set("verdict", verdict)
            if verdict:
                self.store.set("over", verdict)  # for those who come late
                joining.has(self.store, ends, LINGER_SECONDS)
                time.sleep(2 * joining.LOOK_SECONDS)
            return verdict
        except dist.DistError:  # node 0's launcher, which holds the store, has died
            return mine


def meet(nodes: Nodes, restarts: int) -> Agreement:
    """Return once the launchers of all nodes have come; torchrun would wait without a word.

    restarts: how many this one has left. Raises a UserError if they do not agree, or do not come
    within JOIN_TIMEOUT.
    """
    if nodes.number >= nodes.count:
        raise UserError(
            f"NODE_RANK={nodes.number} is none of the NNODES={nodes.count} nodes, whose numbers "
            f"are 0 to {nodes.count - 1}"
        )
    clock, is_first = reaching.Clock(int(os.environ["JOIN_TIMEOUT"])), nodes.number == 0

    def connect(limit: timedelta) -> dist.TCPStore:
        where = nodes.host, nodes.port, None, is_first, limit
        return dist.TCPStore(*where, wait_for_workers=False)

    while True:
        try:
            store = reaching.reach(connect, (nodes.host, nodes.port), clock, is_first)
            store.set_timeout(timedelta(seconds=START_SECONDS))
            own = nodes.number, nodes.count, clock
            meeting = joining.Meeting(store, "node", *own, waits=restarts > 0)
            note = {"restarts": restarts, "launch_id": os.environ.get(protocol.LAUNCH_ID, "")}
            return Agreement(nodes, meeting, meeting.join(**note, port=get_free_port()))
        except dist.DistError as error:  # node 0's launcher has died, or starts again
            if is_first or clock.left() <= 0:
                raise UserError(str(error).splitlines()[0]) from None
            time.sleep(0.2)
