"""What torch.distributed, DDP and nccl say of the commonest mistakes, in plainer words."""

import re
import traceback

from torch.nn.parallel import DistributedDataParallel

from engine.errors import UserError, shorten
from engine.ranks import distributed, replicas

# Texts of torch 2.9 to 2.15 and of nccl 2.19 to 2.30; the first that is found counts.
OF_THE_MACHINE = {  # printed alone
    "Duplicate GPU detected": (
        "two ranks use the same GPU: start one rank per GPU, with ./launch.sh or torchrun; "
        "if you start ranks yourself, set LOCAL_RANK for each"
    ),
    "peer access|CUDA IPC handle|cudaIpc": (
        "the GPUs cannot read each other's memory: start again with NCCL_P2P_DISABLE=1"
    ),
    "</torch_.*No space left": (
        "/dev/shm is too small for the batches of loader workers (see df -h /dev/shm): docker run "
        "--ipc=host or --shm-size=8g; else lower --workers"
    ),
    "shared memory segment|extend /dev/shm|posix_fallocate": (
        "/dev/shm is too small for nccl (see df -h /dev/shm): docker run --ipc=host or "
        "--shm-size=8g; else NCCL_SHM_DISABLE=1"
    ),
    "unhandled cuda error|ncclUnhandledCudaError": (
        "nccl failed in a call of CUDA: NCCL_DEBUG=WARN shows why; if the GPUs cannot read each "
        "other's memory, NCCL_P2P_DISABLE=1; if the driver is older than this torch, update it"
    ),
    "unhandled system error|ncclSystemError": (
        "nccl failed in a call of the system: NCCL_DEBUG=WARN shows why; has another rank died? "
        "Between nodes try NCCL_SOCKET_IFNAME=<interface>; on one, is /dev/shm full?"
    ),
    "nccl(InternalError|InvalidUsage|InvalidArgument)": ("nccl failed: NCCL_DEBUG=WARN shows why"),
    "SyncBatchNorm (expected input tensor to be on|layers only work with GPU)": (
        "--sync-bn: torch has it on GPUs only; omit the flag"
    ),
    "No working C\\+\\+ compiler|InvalidCxxCompiler|CppCompileError.*Python\\.h": (
        "--compile needs a C++ compiler (g++, or the one that CXX names) and this Python's headers "
        "(python3-dev): install them, or omit the flag"
    ),
    "Failed to find C compiler|Python\\.h: No such file": (
        "--compile needs a C compiler (gcc or clang, or the one that CC names) and this Python's "
        "headers (python3-dev): install them, or omit the flag"
    ),
    "no kernel image is available": (
        "this torch has no code for this GPU (torch.cuda.get_arch_list() names what it has some "
        "for): install a torch that fits, see pytorch.org"
    ),
    "of the same param in process 0|DDP expects same model": (
        "this rank has built another network than rank 0: are flags, data and code the same?"
    ),
    "No inf checks were recorded": (  # by GradScaler, in fp16
        "the optimizer's step found no gradient: call zero_grad() after it, not before"
    ),
    "any parameters that require a gradient": (
        "all weights are frozen: leave some to train, and freeze before engine.wrap"
    ),
}
OF_THE_CODE = {  # followed by the traceback
    "ready (only once|twice)": (
        "a weight is used in two backward passes of one step: call backward() once per "
        "ddp_model(...), on the sum of the losses; torch.utils.checkpoint needs use_reentrant=False"
    ),
    "backward through the graph a second time": (
        "backward() has passed here before: call it once, on the sum of the losses; .detach() "
        "what is kept from step to step"
    ),
    "does not require grad and does not have a grad_fn": (
        "the loss depends on no weight that is trained: did .detach(), .item(), argmax or "
        "torch.no_grad() cut it off?"
    ),
    "modified by an inplace operation": (
        "a value that backward() needs was overwritten, by x += ..., inplace=True or a changed "
        "weight or buffer: torch.autograd.set_detect_anomaly(True) shows which"
    ),
    "efault process group has not been initialized": (
        "a collective before engine.setup or after engine.teardown"
    ),
    "Tensors must be CUDA and dense|No backend type associated with device type cpu": (
        "on GPUs a collective needs a tensor there: create it with device=device"
    ),
    "device-side assert triggered": (
        "an index is out of range on the GPU, most often a label: CUDA_LAUNCH_BLOCKING=1 shows "
        "the line"
    ),
}


def explain(error: Exception) -> UserError | Exception | str | None:
    """Return a line for an error in the training: its cause, and the remedy.

    A UserError or a string is all that has to be said; any other exception wants the traceback.
    """
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" in text:
        return _unused(error, text)
    if not isinstance(error, RuntimeError | ValueError):
        return None
    for pattern, line in OF_THE_MACHINE.items():
        if re.search(pattern, text):
            return f"rank {distributed.rank()}: {line}"
    for pattern, line in OF_THE_CODE.items():
        if re.search(pattern, text):
            return RuntimeError(line)
    return None


def _unused(error: Exception, text: str) -> UserError:
    """Name the weights to which the last backward pass has brought no gradient."""
    frames = traceback.walk_tb(error.__traceback__)
    callers = [frame.f_locals.get("self") for frame, _ in frames]
    networks = [each for each in callers if isinstance(each, DistributedDataParallel)]
    found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", text)
    names = replicas.trained_weights(networks[-1]) if networks else []
    numbers = [int(number) for number in found[1].split()] if found else []
    unused = [names[number] for number in numbers if number < len(names)] or ["some weights"]
    return UserError(
        f"{shorten(unused)}: no gradient, because the loss does not depend on it; use it, remove "
        "it, or freeze it (requires_grad_(False)) before engine.wrap; if other steps use it, "
        "pass find_unused_parameters=True to engine.wrap"
    )
