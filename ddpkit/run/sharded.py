"""--fsdp: each rank holds a part of the weights, gradients and optimizer's state."""

import copy
from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_map_only

from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.run import predicting

LARGE = 1_000_000  # weights of a block that is gathered on its own


def shard(model: nn.Module, size: int) -> nn.Module:
    """Return a copy of `model` to train, whose weights are shared out among the ranks.

    By torch's fully_shard. `Run` saves whole weights, and copies them to `model` to evaluate it.

    size: of the images that it takes, to find out which layers are called.

    Raises a UserError if torch has it on GPUs only, and there are none.

        trained = ddpkit.shard(model, args.image_size)
        optimizer = torch.optim.AdamW(trained.parameters())
        ddp_model = ddpkit.wrap(trained, device)
    """
    device = next(model.parameters()).device
    on_cpu = device.type == "cpu"
    if on_cpu and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise UserError(f"--fsdp: torch {torch.__version__} has it on GPUs only; omit the flag")
    twin = copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # fully_shard's limit
    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    for module in (*find_blocks(twin, size), twin):
        # An operation in place on a view would remove the hook that gathers for backward().
        module.register_forward_hook(lambda _, inputs, outputs: tree_map_only(Tensor, own, outputs))
        block = fully_shard(module, mesh=mesh)
        if on_cpu:  # gloo has no mean
            block.set_force_sum_reduction_for_comms(True)
    return twin


def own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor._is_view() else tensor


def find_blocks(model: nn.Module, size: int) -> list[nn.Module]:
    """Return the modules in `model`, inner ones first, that have LARGE weights besides inner ones'.

    Only modules that are called, once in a pass, which is when fully_shard gathers their weights.
    """
    calls: Counter[nn.Module] = Counter()
    modules = [*model.modules()]
    hooks = [m.register_forward_pre_hook(lambda m, _: calls.update([m])) for m in modules]
    channels = (layer.in_channels for layer in modules if isinstance(layer, nn.Conv2d))
    predicting.forward(model, size, next(channels, 3))
    for hook in hooks:
        hook.remove()
    uses = Counter(weight for m in modules for weight in m.parameters(recurse=False))
    taken = {weight for weight in uses if uses[weight] > 1}  # tied ones stay together
    blocks = []
    for module in reversed(modules[1:]):
        weights = [weight for weight in module.parameters() if weight not in taken]
        is_large = sum(weight.numel() for weight in weights) >= LARGE
        if is_large and calls[module] == 1:
            blocks.append(module)
            taken.update(weights)
    return blocks


@torch.no_grad()
def gather(shared: nn.Module, model: nn.Module) -> None:
    """Copy the weights and buffers of `shared` to `model`, of which it is a copy; on all ranks."""
    whole = model.state_dict()
    for name, value in shared.state_dict().items():
        if isinstance(value, Tensor):
            whole[name].copy_(getattr(value, "full_tensor", lambda value=value: value)())
