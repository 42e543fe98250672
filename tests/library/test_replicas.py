"""Buffers and weights of all ranks become and stay equal, however they lie in memory."""

import pytest
import torch
import torch.distributed as dist
from generated import refusal
from ranks import on_ranks
from torch import nn

from ddpkit.ranks import distributed, replicas

WIDE = torch.arange(24, dtype=torch.float32).view(4, 6)
BUFFERS = {
    "sliced": lambda: WIDE.clone()[:, 1::2],
    "transposed": lambda: WIDE.clone().t(),
    "channels_last": lambda: WIDE.view(1, 2, 3, 4).to(
        memory_format=torch.channels_last
    ),
    "scalar": lambda: torch.tensor(7),
    "empty": lambda: torch.zeros(0, 3),
    "flags": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.complex(WIDE, WIDE + 1).conj(),
    "shorts": lambda: torch.tensor([1, 2, 3], dtype=torch.int16),
    "halves": lambda: torch.ones(3, dtype=torch.bfloat16),
}


def odd_network(rank: int) -> nn.Module:
    """Buffers of all kinds, whose numbers are a rank's own."""
    network = nn.Module()
    network.register_parameter("weight", nn.Parameter(WIDE.clone().t()))
    for name, make in BUFFERS.items():
        with torch.inference_mode(name == "halves"):
            buffer = make()
            if rank:
                buffer.zero_()
        network.register_buffer(name, buffer)
    network.register_buffer("sparse", torch.eye(3).to_sparse())
    network.register_buffer("cache", torch.ones(1 + rank), persistent=False)
    return network


@on_ranks(1, 3)
def test_buffers_of_all_kinds():
    """All ranks get rank 0's, in one collective; what lies beside a slice stays a rank's own."""
    network = odd_network(distributed.rank())
    sent = []
    strides = {
        name: each.stride() for name, each in network.named_buffers() if name in BUFFERS
    }
    beside = network.sliced._base
    if distributed.rank():
        beside.fill_(9)
        network.sliced.zero_()
    broadcast = dist.broadcast_object_list
    dist.broadcast_object_list = lambda box, src: (
        sent.append(box),
        broadcast(box, src),
    )
    replicas.sync_networks([network, "no network"])
    assert len(sent) == 1
    for name, expected in odd_network(0).named_buffers():
        found = getattr(network, name)
        if name != "cache":
            assert torch.equal(found.to_dense(), expected.to_dense()), name
            assert name == "sparse" or found.stride() == strides[name]
    assert len(network.cache) == 1 + distributed.rank()
    if distributed.rank():
        assert (beside[:, ::2] == 9).all()


def change(network: nn.Module) -> None:
    network.weight.data[1, 1] += 1


def add(network: nn.Module) -> None:
    network.register_buffer("another", torch.ones(2))


def grow(network: nn.Module) -> None:
    network.shorts = torch.ones(4, dtype=torch.int16)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (change, "weight"),
        (add, "another"),
        (grow, "shorts"),
    ],
)
@on_ranks(2)
def test_networks_that_differ(act, name):
    """All ranks say so in a line, and none waits."""
    network = odd_network(distributed.rank())
    if distributed.rank() == 1:
        act(network)
    with refusal("replicas.check_same", f"{name} differs between ranks"):
        replicas.sync_networks([network])


@on_ranks(3)
def test_plain_ddp_with_buffers() -> None:
    """With torch's own arguments it is prepared, too, and stays as it was made."""
    net = nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, 2),
    )
    for options in {}, {"static_graph": True}, {"find_unused_parameters": True}:
        ddp_model = nn.parallel.DistributedDataParallel(net, **options)
        replicas.prepare_network(ddp_model)
        assert ddp_model.broadcast_buffers
        for _ in range(2):
            ddp_model(torch.rand(4, 3)).sum().backward()
