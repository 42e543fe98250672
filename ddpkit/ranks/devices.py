"""On which device a rank computes, and what carries its collectives."""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpkit.errors import UserError
from ddpkit.ranks import alone, environment, meeting

NETWORK = "GLOO_SOCKET_IFNAME"  # which interface gloo uses
SIOCGIFADDR = 0x8915  # in Linux' <linux/sockios.h>
CPU = torch.device("cpu")
# A kind of GPU without collectives, float64 and pinned memory: for one process
APPLE = "mps"
# Attributes that tell a GPU from others, as far as torch has them
NAMES = "uuid pci_domain_id pci_bus_id pci_device_id"
ON_CPU = f"use the CPU ({environment.GPUS}=-1)"


def kind() -> torch.device:
    """Return the kind of GPU that torch can use here; the CPU for CUDA_VISIBLE_DEVICES= or -1."""
    if environment.visible_gpus() == [] or not torch.accelerator.is_available():
        return CPU
    return torch.accelerator.current_accelerator() or CPU


def for_sums(device: torch.device) -> torch.device:
    """Return where sums are kept in float64: on `device`, or the CPU if that is Apple's GPU."""
    return CPU if torch.device(device).type == APPLE else device


def copies_async(device: torch.device) -> bool:
    """Return whether copies to it, from pinned memory, go on while this process does other work.

    To Apple's GPU they could read memory that has been freed.
    """
    # a caller may give its name
    return torch.device(device).type not in ("cpu", APPLE)


def memory_layout(device: torch.device) -> torch.memory_format:
    """Return how images and weights lie in memory: channels last, which is faster.

    On Apple's GPU torch up to 2.13 computes wrong gradients of BatchNorm with it.
    """
    if torch.device(device).type == APPLE:
        return torch.contiguous_format
    return torch.channels_last


def pick() -> tuple[torch.device, dict]:
    """Return this rank's GPU, or the CPU if there is none, and a note for `check`.

    The numbers of a node's ranks go round the GPUs that each of them sees: all of the node, or, as
    with srun --gpus-per-task=1, one that is its own.
    """
    # _why_unused reports what torch says of the driver.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = kind()
    size = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if device.type == APPLE and size != "1":
        meeting.say_on_node(
            f"Apple's GPU supports only one process: using the CPU for {size} ranks"
        )
        device = CPU
    note = {"device": device.type, "node": environment.node(), "mistake": ""}
    if device.type != "cpu":
        number = int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count()
        device = torch.device(device.type, number)
    else:
        note["mistake"] = _why_unused()
    try:
        note["gpu"] = _name(device)
    except Exception as error:  # a broken GPU: `check` reports it on all nodes
        reason = str(error).partition("\n")[0]
        note["mistake"] = f"{device} cannot be used ({reason})"
    return device, note


def _why_unused() -> str:
    """Return why torch cannot use the GPUs that nvidia-smi shows; "" if there are none."""
    count = 0 if environment.visible_gpus() == [] else environment.list_gpus()
    if not count:
        return ""
    reason = "torch was built without CUDA"
    if torch.version.cuda:
        try:
            torch.cuda.init()
            reason = "CUDA shows none"
        except Exception as error:
            reason = str(error).split("\n")[0].split(". ")[0]
    asked = os.environ.get(environment.GPUS)
    asked = f" with {environment.GPUS}={asked}" if asked else ""
    shown = f"nvidia-smi shows {count} GPU(s), but torch {torch.__version__} can use none{asked}"
    return f"{shown}: {reason}; install a matching driver and torch (pytorch.org), or {ON_CPU}"


def _name(device: torch.device) -> str:
    """Return what tells a GPU of this host from others; "" if torch does not say."""
    if device.index is None:
        return ""
    find = getattr(torch.get_device_module(device), "get_device_properties", None)
    properties = find and find(device)
    texts = (str(getattr(properties, key, "")) for key in NAMES.split())
    name = " ".join(texts).strip()
    return f"{name} {device.index}" if name else ""


def check(
    notes: Sequence[dict], device: torch.device, is_debugged: bool
) -> torch.device:
    """Return `device`, or the CPU if ranks would share one under a debugger; else a UserError."""
    gpus: dict[str, list[str]] = {}
    kinds = {}  # one rank of each
    for rank, note in enumerate(notes):
        node = note["node"]
        if note["mistake"]:
            raise UserError(f"{node}: {note['mistake']}")
        gpus.setdefault(node, []).append(note["gpu"] or str(rank))
        kinds[note["device"]] = f"rank {rank} ({node}) on {note['device']}"
    if len(kinds) > 1:
        texts = ", ".join(kinds.values())
        raise UserError(f"ranks use different types of device: {texts}")
    for node, names in gpus.items():
        count = len(set(names))
        if count == len(names):
            continue
        line = f"{len(names)} ranks on {node} but only {count} GPU(s):"
        if is_debugged:
            meeting.say_on_node(f"{line} debugging on the CPU")
            return CPU
        own = f"give each rank its own by LOCAL_RANK or {environment.GPUS}"
        raise UserError(
            f"{line} start at most {count} (NPROC={count}), {own}, or {ON_CPU}"
        )
    return device


def backend(device: torch.device) -> str:
    """Return what carries collectives: "gloo", or with GPUs such as "cpu:gloo,cuda:nccl".

    On Apple's GPU, where torch has none, "alone", of one process.

    Objects, such as a checkpoint, then travel between the CPUs and take no GPU memory.
    """
    if device.type == APPLE:
        alone.register(device.type)
        return alone.NAME
    name = dist.get_default_backend_for_device(device)
    if name == "nccl" and not dist.is_nccl_available():  # as on Windows
        name = "gloo"
    if name == "gloo" and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        meeting.say_on_node(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP with gloo: using INFO"
        )
        dist.set_debug_level(dist.DebugLevel.INFO)
    if device.type == "cpu":
        return name
    return f"cpu:gloo,{device.type}:{name}"


def of_group() -> torch.device:
    """Return the kind of device whose tensors the group's collectives take."""
    return CPU if "gloo" in dist.get_backend() else kind()


def is_mixed() -> bool:
    """Return whether the group has a backend of GPUs beside that of CPUs."""
    return "," in dist.get_backend()


def address(host: str) -> str:
    """Return this node's own address on the network that leads to `host`; "" if none does."""
    with contextlib.suppress(OSError, UnicodeError):  # as for a name that cannot be one
        known = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, there = known[0]
        with socket.socket(family, kind) as asked:
            asked.connect(there)  # which sends nothing
            return str(asked.getsockname()[0])
    return ""


def choose_network(notes: Sequence[dict]) -> None:
    """Have gloo use the network on which the ranks have met, if this host's name does not tell.

    On Debian a host's name is 127.0.1.1, which no other node reaches. What people set has priority.
    """
    if sys.platform != "linux" or NETWORK in os.environ:
        return
    of_name = address(socket.gethostname()) or "::1"
    if not ipaddress.ip_address(of_name).is_loopback:
        return
    own = {address(os.environ["MASTER_ADDR"])}
    # Where rank 0 is, that may be the host's name: the others' addresses lead out.
    for note in notes:
        if note["node"] != environment.node() and note["address"]:
            own.add(address(note["address"]))
    for _, name in socket.if_nameindex():
        if name != "lo" and _address_of(name) in own - {""}:
            os.environ[NETWORK] = name


def _address_of(name: str) -> str:
    """Return the IPv4 address of a network interface of this node; "" if it has none."""
    import fcntl  # not on Windows

    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked,
    ):
        request = struct.pack("256s", name.encode())
        return socket.inet_ntoa(fcntl.ioctl(asked, SIOCGIFADDR, request)[20:24])
    return ""
