"""--fsdp: weights, gradients and the optimizer's state shared out among the ranks.

What is trained is a copy of the network whose weights are DTensors: each rank holds a part of each.
Evaluation and checkpoints have whole tensors, so that checkpoints are the same as with DDP.
"""

import copy
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from engine.errors import UserError
from engine.ranks import distributed
from engine.run import sizes
from engine.run.checkpoint import State

LARGE = 1_000_000  # weights of a block that is gathered on its own


def shard(model: nn.Module, size: int) -> nn.Module:
    """Return a copy of `model` to train, whose weights are shared out among the ranks.

    Each rank holds a part of each weight, of its gradient and of the optimizer's state: torch's
    fully_shard. `Run` saves whole weights, and copies them to `model` before it is evaluated.

    size: of the images that it takes, to find out which layers are called.

    Raises a UserError if torch has it on GPUs only, and there are none.

        trained = engine.shard(model, args.image_size)
        optimizer = torch.optim.AdamW(trained.parameters())
        ddp_model = engine.wrap(trained, device)
    """
    device = next(model.parameters()).device
    on_cpu = device.type == "cpu"
    if on_cpu and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise UserError(f"--fsdp: torch {torch.__version__} has it on GPUs only; omit the flag")
    twin = copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # fully_shard's limit
    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    for module in (*find_blocks(twin, size), twin):
        module.register_forward_hook(copy_views)
        block = fully_shard(module, mesh=mesh)
        if on_cpu:  # gloo has no mean
            block.set_force_sum_reduction_for_comms(True)
    return twin


def copy_views(_module: nn.Module, _inputs: object, outputs: object) -> object:
    """Return a block's `outputs` with copies of views in them.

    An operation in place on a view would remove the hook that gathers weights for backward().
    """
    return tree_map_only(Tensor, lambda x: x.clone() if x._is_view() else x, outputs)


def find_blocks(model: nn.Module, size: int) -> list[nn.Module]:
    """Return the modules in `model`, inner ones first, that have LARGE weights besides inner ones'.

    Only modules that are called, once in a pass: fully_shard gathers weights when that happens, but
    attention, for one, uses those of a layer that it never calls.
    """
    calls: Counter[nn.Module] = Counter()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: calls.update([module]))
        for module in model.modules()
    ]
    convolutions = (layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    sizes.forward(model, size, next((layer.in_channels for layer in convolutions), 3))
    for hook in hooks:
        hook.remove()
    uses = Counter(w for module in model.modules() for w in module.parameters(recurse=False))
    taken: set[nn.Parameter] = set()
    blocks = []
    for module in reversed([*model.modules()][1:]):
        weights = [weight for weight in module.parameters() if weight not in taken]
        is_tied = any(uses[weight] > 1 for weight in weights)  # those stay together
        is_large = sum(weight.numel() for weight in weights) >= LARGE
        if is_large and calls[module] == 1 and not is_tied:
            blocks.append(module)
            taken.update(weights)
    return blocks


@torch.no_grad()
def gather(shared: nn.Module, model: nn.Module) -> None:
    """Copy the weights and buffers of `shared` to `model`, of which it is a copy; on all ranks."""
    whole = model.state_dict()
    for name, value in shared.state_dict().items():
        if isinstance(value, Tensor):
            whole[name].copy_(value.full_tensor() if isinstance(value, DTensor) else value)


def are_finite(weights: Sequence[Tensor]) -> list[bool]:
    """Return which weights are finite; reads the device once. All ranks have to call it."""
    parts = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    first = parts[0].device  # of a network that is spread over several GPUs
    finite = torch.stack([part.isfinite().all().to(first) for part in parts])
    if any(isinstance(weight, DTensor) for weight in weights):
        finite = distributed.reduce_tensor(finite.int(), "min")
    return finite.bool().tolist()


def whole(state: State) -> State:
    """Return `state` for a checkpoint: on rank 0 shared tensors become whole ones, on the CPU.

    All ranks have to call it.
    """

    def gathered(value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor()
        return full.cpu() if distributed.is_rank_zero() else full.new_empty(0)

    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return state
    # Keeps what a network's state has besides: the versions of its modules.
    return copy.deepcopy(state, {id(tensor): gathered(tensor) for tensor in tensors})


def distribute(state: State, optimizer: Optimizer) -> State:
    """Return the `state` of a checkpoint with moments shared out like the weights."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if not any(isinstance(weight, DTensor) for weight in weights):
        return state

    def shared(weight: Tensor, value: object) -> object:
        if not isinstance(value, Tensor) or not isinstance(weight, DTensor):
            return value
        if value.shape != weight.shape:  # no moment, such as a count of steps
            return value
        value = value.to(weight.device, memory_format=torch.contiguous_format)
        return distribute_tensor(value, weight.device_mesh, weight.placements)

    moments = {
        number: {name: shared(weights[number], value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}
