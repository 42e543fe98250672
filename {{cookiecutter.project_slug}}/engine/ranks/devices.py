"""On which device a rank computes, and what carries its collectives."""

import os

import torch
import torch.distributed as dist

from engine.errors import UserError


def pick(is_task: bool, is_debugged: bool) -> torch.device:
    """Return this rank's GPU, or the CPU if there is none.

    is_task: whether srun or mpirun started this rank.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    has_own_gpu = gpus == 1 and is_task  # srun --gpus-per-task=1 shows each task only its own
    if ranks > gpus and not has_own_gpu:
        line = f"{ranks} ranks on this node but {gpus} GPU(s):"
        if is_debugged:
            _say(f"{line} debugging on the CPU")
            return torch.device("cpu")
        remedy = f"start at most {gpus} (NPROC={gpus}), or use the CPU (CUDA_VISIBLE_DEVICES=)"
        raise UserError(f"{line} {remedy}")
    device = torch.device("cuda", 0 if has_own_gpu else int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """Return "nccl" or "gloo"; with gloo, lower TORCH_DISTRIBUTED_DEBUG if DDP would crash."""
    if device.type == "cuda":
        return "nccl"
    if torch.__version__ >= "2.7" and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        _say(  # DDP takes the wrapper of DETAIL for gloo
            f"TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP with gloo in torch {torch.__version__}: "
            "using INFO; a hang or a mismatch is explained without it"
        )
        dist.set_debug_level(dist.DebugLevel.INFO)
    return "gloo"


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # not in a group yet
        print(line, flush=True)


def current(backend: str) -> torch.device:
    """Return the device of a process whose group somebody else has made, with `backend`."""
    if "nccl" not in backend:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
