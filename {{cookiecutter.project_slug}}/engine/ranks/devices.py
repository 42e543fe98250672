"""On which device a rank computes, and what carries its collectives."""

import os
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import UserError
from engine.ranks import gpus
from engine.ranks.joining import Note

CPU = torch.device("cpu")
NAMES = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")  # of a GPU, as far as torch knows
ON_CPU = f"use the CPU ({gpus.VARIABLE}=-1)"


def kind() -> torch.device:
    """Return the kind of GPU that torch can use here, without a number; the CPU if there is none.

    CUDA_VISIBLE_DEVICES= or -1 means the CPU with every kind.
    """
    if gpus.wanted() == [] or not torch.accelerator.is_available():
        return CPU
    return torch.accelerator.current_accelerator() or CPU


def has_collectives(device: torch.device) -> bool:
    """Return whether ranks can exchange tensors of `device`; nothing carries those of Apple's."""
    return device.type != "mps"


def carried(tensor: Tensor) -> Tensor:
    """Return what to give to a collective that changes `tensor`.

    If nothing carries such tensors, this is a group of one, where it would not change.
    """
    return tensor if has_collectives(tensor.device) else torch.zeros(())


def copies_ahead(device: torch.device) -> bool:
    """Return whether copies to and from `device` may go on while the host does.

    Those of Apple's GPUs would read memory that has been released since.
    """
    return device.type != "mps"


def double(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on `device`: float64, or float32 on Apple's GPUs, which lack it."""
    return torch.float32 if device.type == "mps" else torch.float64


def pick(on_cpu: bool = False) -> tuple[torch.device, Note]:
    """Return this rank's GPU, or the CPU if there is none, and what `check` has to know of it.

    on_cpu: take the CPU in any case.

    The numbers of a node's ranks go round the GPUs that each of them sees: all of the node, or, as
    with srun --gpus-per-task=1, one that is its own.
    """
    with warnings.catch_warnings(record=True) as caught:  # what torch says of the driver
        device, mistake = CPU if on_cpu else kind(), ""
    if device.type == "cpu":
        mistake = "" if on_cpu else _why_unused()
        for each in () if mistake else caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    elif has_collectives(device):
        number = int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count()
        device = torch.device(device.type, number)
    elif "RANK" in os.environ and os.environ.get("WORLD_SIZE") != "1":
        device = CPU
    return device, {"device": device.type, "gpu": _name(device), "mistake": mistake}


def _why_unused() -> str:
    """Return why torch cannot use the GPUs that nvidia-smi shows; "" if nothing is wrong.

    Nothing is if CUDA_VISIBLE_DEVICES hides them. If it shows none, as of a broken driver, say so.
    """
    names = gpus.wanted()
    listed = None if names == [] else gpus.by_nvidia_smi()
    if listed is None:
        return ""
    uuids, text = listed
    if not uuids:
        _say(f"nvidia-smi shows no GPU ({text.split('. ')[0][:100]}): computing on the CPU")
        return ""
    if names and not gpus.count_known(names, uuids):
        reason = f"{gpus.VARIABLE}={os.environ[gpus.VARIABLE]} names none of them; mend it"
    elif torch.version.cuda is None:
        reason = "it is built without CUDA; install one with CUDA (pytorch.org)"
    else:
        reason = f"{_refusal()}; install a driver and a torch that fit (pytorch.org)"
    shown = f"nvidia-smi shows {len(uuids)} GPU(s), but torch {torch.__version__} can use none"
    return f"{shown}: {reason}, or {ON_CPU}"


def _refusal() -> str:
    """Return what CUDA says, in one sentence."""
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).split("\n")[0].split(". ")[0]
    return "CUDA shows none"


def _name(device: torch.device) -> str:
    """Return what tells a GPU of this host from others; "" if torch does not say."""
    module = torch.get_device_module(device)
    if device.index is None or not hasattr(module, "get_device_properties"):
        return ""
    found = module.get_device_properties(device)
    name = " ".join(str(getattr(found, key, "")) for key in NAMES).strip()
    if name and torch.accelerator.device_count() > 1:
        name += f" {device.index}"  # parts of a GPU may have all else in common
    return name


def check(notes: Sequence[Note], device: torch.device, is_debugged: bool) -> torch.device:
    """Return `device`; if ranks would share one, the CPU under a debugger.

    notes: of all ranks. Raises a UserError, the same in all, if their devices do not fit.
    """
    hosts: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        hosts.setdefault(note["host"], []).append(rank)
        if note["mistake"]:
            where = f"{note['place']}: " if len({each["host"] for each in notes}) > 1 else ""
            raise UserError(f"{where}{note['mistake']}")
    kinds = {note["device"]: rank for rank, note in enumerate(notes)}
    if len(kinds) > 1:
        texts = [f"rank {r} ({notes[r]['place']}) on {name}" for name, r in kinds.items()]
        raise UserError(f"ranks compute on different kinds of device: {', '.join(texts)}")
    for ranks in hosts.values():
        count = len({notes[rank]["gpu"] or rank for rank in ranks})
        if count == len(ranks):
            continue
        line = f"{len(ranks)} ranks on {notes[ranks[0]]['place']} but {count} GPU(s) for them:"
        if is_debugged:
            _say(f"{line} debugging on the CPU")
            return CPU
        own = f"give each rank its own by LOCAL_RANK or {gpus.VARIABLE}"
        raise UserError(f"{line} start at most {count} (NPROC={count}), {own}, or {ON_CPU}")
    return device


def backend(device: torch.device) -> str:
    """Return what carries collectives: "nccl", "gloo" or another that torch has for `device`.

    With gloo, lower TORCH_DISTRIBUTED_DEBUG if DDP would crash.
    """
    name = dist.get_default_backend_for_device(device) if has_collectives(device) else "gloo"
    if not getattr(dist, f"is_{name}_available", lambda: True)():
        raise UserError(f"torch {torch.__version__} has no {name} for {device.type}: {ON_CPU}")
    is_detailed = dist.get_debug_level() == dist.DebugLevel.DETAIL
    if name == "gloo" and is_detailed:
        _say(  # DDP takes the wrapper of DETAIL for gloo
            f"TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP with gloo in torch {torch.__version__}: "
            "using INFO; a hang or a mismatch is explained without it"
        )
        dist.set_debug_level(dist.DebugLevel.INFO)
    return name


def current(backend: str) -> torch.device:
    """Return the device of a process whose group somebody else has made, with `backend`."""
    device = kind()
    if device.type == "cpu" or not has_collectives(device):
        return CPU
    if dist.get_default_backend_for_device(device) not in backend:
        return CPU
    return torch.device(device.type, torch.accelerator.current_device_index())


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # not in a group yet
        print(line, flush=True)
