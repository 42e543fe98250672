"""Initial weights, published ones or those of a file, as far as they match the network."""

import contextlib
import functools
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import WeightsEnum

from ddpkit.errors import DiskError, UserError, shorten
from ddpkit.ranks import distributed
from ddpkit.run import checkpoint

KEYS = ("model", "state_dict", "model_state_dict")  # under which programs save weights
SECONDS = 10.0  # without an answer, after which a download fails
Fetch = Callable[[str], Mapping[str, Tensor]]
Find = Callable[[], tuple[list[str], Fetch]]
Build = Callable[..., nn.Module]


def load_weights(
    model: nn.Module, weights: str, arch: str = "", encoder: str = "", build: Build | None = None
) -> None:
    """Copy --weights into `model`, alike on all ranks; only rank 0 downloads and reads.

    weights: "none"; a .pt or .pth file; the name of published weights; or "auto", which stands for
        the best published ones, or for "none" if those cannot be had, as it then says.
    arch: a network of torchvision, timm/NAME, or a decoder of segmentation-models-pytorch.
    encoder: of such a decoder; the published weights are the encoder's.
    build: of a network of timm; makes it anew with pretrained=True.

    Tensors are copied by name if their shapes match, others are left out and counted in a line; a
    first layer for RGB is adapted to other channels.

    Raises a UserError if a file or a name cannot be had, or if none of its tensors fits.
    """
    name, is_auto = weights, weights == "auto"
    find = functools.partial(find_published, arch, encoder, build)
    if is_auto:
        name = next(iter(find()[0]), "none")
        is_none = name == "none"
        then = "published for this network" if is_none else "downloaded unless cached ..."
        distributed.say(f"--weights auto: {name}, {then}")
    if name == "none":
        return
    found = distributed.await_rank_zero(attempt, name, find)
    if not isinstance(found, str):
        copy_matching(model, found)
    elif is_auto:
        distributed.say(f"{found}; starts from scratch; use --weights FILE, or --weights none")
    else:
        raise UserError(found)


def attempt(name: str, find: Find) -> Mapping[str, Tensor] | str:
    """Return the tensors of --weights `name`, or a line that says why they cannot be had."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS)  # torch.hub would wait for ever
    try:
        return read(name, find)
    except DiskError:
        raise
    except UserError as error:
        return error.line
    except Exception as error:  # urllib, httpx and huggingface_hub have no common one
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        return f"--weights {name}: download failed ({reason})"
    finally:
        socket.setdefaulttimeout(before)


def read(name: str, find: Find) -> Mapping[str, Tensor]:
    """Return the tensors of published weights, or of a file: at its top, or under KEYS."""
    if name.endswith((".pt", ".pth")):
        state = checkpoint.read_file(name)
        for _ in range(2):
            state = next((state[k] for k in KEYS if isinstance(state.get(k), dict)), state)
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}
    names, fetch = find()
    if name not in names:
        known = ", ".join(names) or "none"
        raise UserError(f"--weights {name}: published are {known}; or name a .pt file")
    return fetch(name)


def find_published(arch: str, encoder: str, build: Build | None) -> tuple[list[str], Fetch]:
    """Return the names of published weights, the best first, and what downloads those of a name."""
    if arch in torchvision.models.list_models():
        choices = torchvision.models.get_model_weights(arch).__members__
        best = [choices["DEFAULT"].name] if choices else []
        download = functools.partial(WeightsEnum.get_state_dict, progress=False, check_hash=True)
        return [*dict.fromkeys([*best, *choices])], lambda name: download(choices[name])
    import timm

    if arch.startswith("timm/"):
        config = timm.get_pretrained_cfg(arch[5:])
        if not (build and config and timm.is_model_pretrained(arch[5:])):
            return [], lambda _: {}
        return [config.tag or "default"], lambda _: fetch_timm(config, build)
    if not encoder:
        return [], lambda _: {}
    import segmentation_models_pytorch as smp

    if encoder.startswith("tu-"):  # its tag, if any, says which weights
        has_any = timm.is_model_pretrained(encoder[3:])
        config = timm.get_pretrained_cfg(encoder[3:]) if has_any else None
        repositories = {"imagenet": config.hf_hub_id} if config else {}
    else:
        settings = smp.encoders.encoders.get(encoder, {}).get("pretrained_settings") or {}
        repositories = {name: each.get("repo_id") for name, each in settings.items()}

    def fetch(name: str) -> dict[str, Tensor]:
        with reaching(repositories[name]), torch.random.fork_rng([]):
            network = smp.encoders.get_encoder(encoder, weights=name)
        return {f"encoder.{key}": value for key, value in network.state_dict().items()}

    return sorted(repositories, key="imagenet".__ne__), fetch


@contextlib.contextmanager
def reaching(repository: str | None) -> Iterator[None]:
    """Leave the hub alone in the block unless it answers: its library would try for minutes."""
    import huggingface_hub as hub

    before = hub.constants.HF_HUB_OFFLINE
    try:
        if repository:
            url = hub.hf_hub_url(repository, "config.json")
            hub.get_hf_file_metadata(url, timeout=SECONDS)
    except Exception as error:
        answer = getattr(error, "response", None)  # such as 404
        if answer is None or answer.status_code >= 500:
            hub.constants.HF_HUB_OFFLINE = True  # what its cache has
    try:
        yield
    finally:
        hub.constants.HF_HUB_OFFLINE = before


def fetch_timm(config: Any, build: Build) -> dict[str, Tensor]:
    """Return the tensors of timm's network but those of its last layer, as `build` makes it."""
    with reaching(config.hf_hub_id), torch.random.fork_rng([]):
        network = build(pretrained=True)
    heads = config.classifier if isinstance(config.classifier, tuple) else (config.classifier,)
    last = tuple(f"{head}." for head in heads)
    return {key: each for key, each in network.state_dict().items() if not key.startswith(last)}


def copy_matching(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy the tensors whose names and shapes match, and print which of `model` do not."""

    def bare(name: str) -> str:  # a file may have `module.fc.weight` for `fc.weight`
        return re.sub(r"^((net|model)\.)+", "", re.sub(r"\b(module|_orig_mod)\.", "", name))

    mine, missing = model.state_dict(), torch.empty(0)
    named = {bare(name): value for name, value in weights.items()}
    fitting = {}
    for name, weight in mine.items():
        value = weights.get(name, named.get(bare(name), missing))
        if weight.ndim == value.ndim == 4 and weight.shape[1] != value.shape[1] == 3:
            from timm.models import adapt_input_conv  # its import takes half a second

            value = adapt_input_conv(weight.shape[1], value)
        if value.shape == weight.shape and checkpoint.kind_of(value) == checkpoint.kind_of(weight):
            fitting[name] = value
    if not fitting:
        line = "--weights: no tensor has the same name and shape as one of this network, which"
        theirs = next(iter(weights), "nothing")
        raise UserError(f"{line} begins with {next(iter(mine))}; the file begins with {theirs}")
    model.load_state_dict(fitting, strict=False)
    new = [name for name in mine if name not in fitting]
    line = f"--weights: {len(fitting)} of {len(mine)} tensors loaded"
    distributed.say(f"{line}; new: {shorten(new)}" if new else line)
