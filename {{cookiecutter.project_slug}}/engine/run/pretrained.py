"""Initial weights, from torchvision or from a file, as far as they match the network."""

import torchvision
from torch import Tensor, nn

from engine.errors import UserError, shorten
from engine.ranks import distributed
from engine.run import checkpoint


def read_weights(weights: str, arch: str) -> dict[str, Tensor]:
    """Return a state dict: of a file (a checkpoint or a state dict) or of torchvision.

    weights: the path of a .pt or .pth file, or a name that torchvision has for `arch`.
    """
    if weights.endswith((".pt", ".pth")):
        state = checkpoint.read_file(weights)
        return state.get("model", state)
    choices = torchvision.models.get_model_weights(arch)
    if weights not in choices.__members__:
        names = ", ".join(choices.__members__)
        raise UserError(f"--weights {weights}: {arch} has {names}; or name a .pt file")
    try:
        with distributed.rank_zero_first():
            return choices[weights].get_state_dict(progress=False, check_hash=True)
    except OSError as error:
        raise UserError(f"--weights {weights}: download failed ({error})") from None


def copy_matching(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy the tensors whose names and shapes match, and print which of `model` do not."""
    own = model.state_dict()
    fitting = {k: v for k, v in weights.items() if k in own and own[k].shape == v.shape}
    if not fitting:
        raise UserError("--weights: no tensor has the same name and shape as one of this network")
    model.load_state_dict(fitting, strict=False)
    new = [name for name in own if name not in fitting]
    line = f"--weights: {len(fitting)} of {len(own)} tensors loaded"
    distributed.say(f"{line}; new: {shorten(new)}" if new else line)
