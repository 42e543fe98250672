"""Initial weights, published ones or those of a file, as far as they match the network."""

import functools
import socket
from collections.abc import Callable, Mapping

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import WeightsEnum

from engine.errors import DiskError, UserError, shorten
from engine.ranks import distributed
from engine.run import checkpoint

KEYS = ("model", "state_dict", "model_state_dict")  # under which programs save weights
SECONDS = 10.0  # without an answer, after which a download fails
WRAPPERS = {"module", "_orig_mod"}  # what DDP, averages and torch.compile add to names
Fetch = Callable[[str], Mapping[str, Tensor]]


def load_weights(model: nn.Module, weights: str, arch: str = "", encoder: str = "") -> None:
    """Copy --weights into `model`, alike on all ranks; only rank 0 downloads and reads.

    weights: "none"; a .pt or .pth file; the name of published weights; or "auto", which stands for
        the best published ones, or for "none" if those cannot be had, as it then says.
    arch: a network of torchvision, or a decoder of segmentation-models-pytorch.
    encoder: of such a decoder; the published weights are the encoder's.

    Tensors are copied by name if their shapes match, others are left out and counted in a line; a
    first layer for RGB is adapted to other channels.

    Raises a UserError if a file or a name cannot be had, or if none of its tensors fits.

        engine.load_weights(model, args.weights, args.arch)
    """
    is_auto = weights == "auto"
    name = next(iter(find_published(arch, encoder)[0]), "none") if is_auto else weights
    if name == "none":
        if is_auto:
            distributed.say("--weights auto: none are published for this network; from scratch")
        return
    if is_auto:
        distributed.say(f"--weights auto: {name}, downloaded unless cached ...")
    found = distributed.await_rank_zero(attempt, name, arch, encoder)
    if not isinstance(found, str):
        copy_matching(model, found)
    elif is_auto:
        distributed.say(f"{found}; starts from scratch; use --weights FILE, or --weights none")
    else:
        raise UserError(found)


def attempt(name: str, arch: str, encoder: str) -> Mapping[str, Tensor] | str:
    """Return the tensors of --weights `name`, or a line that says why they cannot be had."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS)  # torch.hub would wait for ever
    try:
        return read(name, arch, encoder)
    except DiskError:
        raise
    except UserError as error:
        return str(error)
    except Exception as error:  # urllib, httpx and huggingface_hub have no common one
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        return f"--weights {name}: download failed ({reason})"
    finally:
        socket.setdefaulttimeout(before)


def read(name: str, arch: str = "", encoder: str = "") -> Mapping[str, Tensor]:
    if name.endswith((".pt", ".pth")):
        return find_tensors(checkpoint.read_file(name))
    names, fetch = find_published(arch, encoder)
    if name not in names:
        known = ", ".join(names) or "none"
        raise UserError(f"--weights {name}: published are {known}; or name a .pt file")
    return fetch(name)


def find_published(arch: str, encoder: str = "") -> tuple[list[str], Fetch]:
    """Return the names of published weights, the best first, and what downloads those of a name."""
    if arch in torchvision.models.list_models():
        choices = torchvision.models.get_model_weights(arch).__members__
        best = [choices["DEFAULT"].name] if choices else []
        download = functools.partial(WeightsEnum.get_state_dict, progress=False, check_hash=True)
        return [*dict.fromkeys([*best, *choices])], lambda name: download(choices[name])
    if not encoder:
        return [], lambda _: {}
    import segmentation_models_pytorch as smp
    import timm

    if is_timms := encoder.startswith("tu-"):  # its tag, if any, says which weights
        has_any = timm.is_model_pretrained(encoder[3:])
        config = timm.get_pretrained_cfg(encoder[3:]) if has_any else None
        repositories = {"imagenet": config.hf_hub_id} if config else {}
    else:
        settings = smp.encoders.encoders.get(encoder, {}).get("pretrained_settings") or {}
        repositories = {name: each.get("repo_id") for name, each in settings.items()}

    def fetch(name: str) -> dict[str, Tensor]:
        repository = repositories[name]
        lost = reach(repository) if repository else None
        try:
            with torch.random.fork_rng([]):
                model = smp.create_model(arch, encoder, True if is_timms else name)
        except Exception as error:
            raise lost or error from None
        return {f"encoder.{key}": value for key, value in model.encoder.state_dict().items()}

    return sorted(repositories, key="imagenet".__ne__), fetch


def reach(repository: str) -> Exception | None:
    """Return why Hugging Face's `repository` cannot be reached; from then on only read its cache.

    huggingface_hub itself would try for minutes.
    """
    import huggingface_hub

    url = huggingface_hub.hf_hub_url(repository, "config.json")
    try:
        huggingface_hub.get_hf_file_metadata(url, timeout=SECONDS)
    except Exception as error:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return error
    return None


def find_tensors(state: checkpoint.State) -> dict[str, Tensor]:
    """Return the tensors of a file: at its top, under one of KEYS, or under two of them."""
    for _ in range(2):
        inner = [state[key] for key in KEYS if isinstance(state.get(key), dict)]
        state = inner[0] if inner else state
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def bare(name: str) -> str:
    """Return the name of a tensor without what wrappers of its network have added."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[0] in ("net", "model") and len(parts) > 1:
        del parts[0]
    return ".".join(parts)


def copy_matching(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy the tensors whose names and shapes match, and print which of `model` do not.

    The first layer's for RGB are adapted if `model` takes another number of channels.
    Names match without their wrappers, too: a file may have `module.fc.weight` for `fc.weight`.
    """
    own = model.state_dict()
    name_of = {bare(name): name for name in own}
    named = {name_of.get(bare(name), name): value for name, value in weights.items()}
    named.update({name: value for name, value in weights.items() if name in own})
    for name in named.keys() & own.keys():
        shape, value = own[name].shape, named[name]
        if len(shape) == value.ndim == 4 and shape[1] != value.shape[1] == 3:
            from timm.models import adapt_input_conv  # its import takes half a second

            named[name] = adapt_input_conv(shape[1], value)
    fitting = {k: v for k, v in named.items() if k in own and own[k].shape == v.shape}
    if not fitting:
        first, mine = next(iter(weights), "nothing"), next(iter(own))
        raise UserError(
            "--weights: no tensor has the same name and shape as one of this network, which begins "
            f"with {mine}; the file begins with {first}"
        )
    model.load_state_dict(fitting, strict=False)
    new = [name for name in own if name not in fitting]
    line = f"--weights: {len(fitting)} of {len(own)} tensors loaded"
    distributed.say(f"{line}; new: {shorten(new)}" if new else line)
