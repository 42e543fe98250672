"""Mistakes that torch.distributed explains badly. Most take a data set, a folder and flags."""

import contextlib
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from forked import Patch, run
from torch import Tensor, nn

from ddpkit.ranks import distributed, protocol, replicas
from ddpkit.ranks.failures import _of_torch
from ddpkit.run.loop import Run
from snippets.faulty import Runs, after_step

DEVICE = torch.device("cpu")


def said(folder: str, name: str, statuses: list[int]) -> list:
    return [statuses, *(Path(f"{folder}/{name}.{end}").read_text() for end in ("out", "err"))]


def listening() -> tuple[socket.socket, str]:
    server = socket.create_server(("127.0.0.1", 0))
    return server, str(server.getsockname()[1])


def ranks_that_disagree(folder: str) -> dict:
    """Ranks without a launcher: statuses and what they say, once each has got other variables."""

    def with_variables(*wrong: dict[str, str]) -> Patch:
        def patch() -> None:
            for name, value in wrong[int(os.environ["RANK"])].items():
                os.environ[name] = value
                if not value:
                    del os.environ[name]

        return patch

    def meet(name: str, *wrong: dict[str, str], seconds: float = 30) -> list:
        output = f"{folder}/{name}"
        flags = ("--dist-timeout", seconds)
        statuses = run(len(wrong), *flags, patch=with_variables(*wrong), output=output)
        return said(folder, name, statuses)

    protocol.NOTICE_SECONDS = 1
    server, port = listening()
    busy = {"MASTER_PORT": port}, {"RANK": "x", "LOCAL_RANK": "0"}
    found = {
        "twice": meet("twice", {}, {}, {"RANK": "1"}),
        "size": meet("size", {}, {"WORLD_SIZE": "3"}),
        "beyond": meet("beyond", {}, {"RANK": "2"}),
        "missing": meet("missing", {"WORLD_SIZE": "3"}, {"WORLD_SIZE": "3"}, seconds=3),
        "unset": meet("unset", {"WORLD_SIZE": ""}, {"WORLD_SIZE": "", "LOCAL_RANK": "1"}),
        "busy": [*meet("busy", *busy), port],
    }
    server.close()
    return found


class Heads(nn.Module):
    """Two outputs; layers with numbers for names, one of them frozen, precede the second."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.first(x), self.second(x)


def unused_weights(debug: bool) -> list[str]:
    """The lines for one of several networks, by itself and accumulating, on one rank."""
    if debug:
        dist.set_debug_level(dist.DebugLevel.INFO)
    distributed.setup()
    lines = []
    for passes in (1, 2):
        networks = [replicas.wrap(Heads(), DEVICE) for _ in range(2)]
        networks[1].module.body[1].requires_grad_()  # after the start, which DDP ignores
        try:
            for step in range(4):
                is_last = (step + 1) % passes == 0
                for ddp_model in networks:
                    skip = contextlib.nullcontext() if is_last else ddp_model.no_sync()
                    with skip:
                        first, second = ddp_model(torch.ones(2, 3))
                        is_whole = ddp_model is networks[0]
                        (first.sum() + second.sum() if is_whole else first.sum()).backward()
        except RuntimeError as error:
            lines.append(str(_of_torch(error)))
    return lines


def mistakes_in_the_loop(data: str, folder: str, *words: object) -> dict:
    train = Runs(data, folder, words).train

    def no_loss() -> None:
        Run.loss = lambda self, loss_sum, count: loss_sum

    def no_gradient() -> None:
        Tensor.backward = lambda *_: None

    def no_division() -> None:
        Run.divide_gradients = lambda *_: None

    def no_end_step() -> None:
        Run.end_step = lambda *_: None

    def out_of_memory() -> None:
        text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 8 GiB"

        def act() -> None:
            raise torch.OutOfMemoryError(text)

        after_step(2, act, rank=1)()

    return {
        "no loss": train("no loss", patch=no_loss),
        "no gradient": train("no gradient", patch=no_gradient),
        "no division": train("no division", patch=no_division),
        "no end_step": train("no end_step", patch=no_end_step),
        "memory": train("memory", patch=out_of_memory),
    }


def in_detail(data: str, folder: str, *words: object) -> list:
    """A run with TORCH_DISTRIBUTED_DEBUG=DETAIL."""

    def patch() -> None:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()

    return Runs(data, folder, words).train("detail", "--epochs", 1, patch=patch)
