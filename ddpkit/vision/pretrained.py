"""Initial weights, published ones or those of a file, as far as they match the network."""

import contextlib
import functools
import os
import re
import socket
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from ddpkit import files
from ddpkit.errors import DiskError, UserError, reason_of, shorten
from ddpkit.ranks import distributed
from ddpkit.run import checkpoint
from ddpkit.vision import networks

# Under these names programs save weights; if two parts fit, the first of these is meant.
KEYS = ("", "model", "state_dict", "model_state_dict", "teacher")
SECONDS = 10.0  # without an answer, after which a download fails
Tensors = Mapping[str, Tensor]
Fetch = Callable[[], Tensors]


def load_pretrained(
    model: nn.Module | None,
    pretrained: str | None,
    arch: str = "",
    encoder: str = "",
    **options: Any,
) -> None:
    """Copy --weights into `model`, alike on all ranks; only rank 0 downloads and reads.

    model: None: only refuse names that do not exist, before data are read.
    pretrained: "none"; a file of torch.save or safetensors; the name of published weights; or
        "auto", which stands for the best published ones, or for "none" if those cannot be had, as
        it then says. None: those of a checkpoint follow.
    arch: a network of torchvision, timm/NAME, or a decoder of segmentation-models-pytorch.
    encoder: of such a decoder; the published weights are the encoder's.
    options: that timm.create_model was given and that change its weights, such as img_size=64.

    Tensors are copied by name, from some prefix on, if their shapes match; a line says how many,
    and which others the network has. A first layer for RGB is adapted to other channels.

    Raises a UserError if a file or a name cannot be had, or if none of its tensors fits.

        model = timm.create_model("vit_small_patch16_224", num_classes=len(classes))
        ddpkit.load_pretrained(model, args.weights, "timm/vit_small_patch16_224")
    """
    if model is None:
        networks.check_names(arch, encoder)
    if pretrained in (None, "none"):
        return
    name = pretrained
    is_auto = name == "auto"
    sources: dict[str, Fetch] = {name: functools.partial(read_tensors, name)}
    if is_auto or not distributed.await_rank_zero(os.path.exists, name):
        sources = find_published(arch, encoder, options)
    if is_auto:
        name = next(iter(sources), "none")
    elif name not in sources:
        known = ", ".join(sources) or "none"
        raise UserError(
            f"--weights {name}: no such file; pretrained weights for this model: {known}"
        )
    if model is None:
        return
    if not sources:
        distributed.print0("--weights auto: no pretrained weights for this model")
        return
    if is_auto:
        distributed.print0(
            f"--weights auto: loading {name} (downloaded unless cached) ..."
        )
    tensors = distributed.await_rank_zero(try_to_fetch, name, sources[name])
    if not isinstance(tensors, str):
        copy_matching(model, tensors, name)
        return
    if not is_auto:
        raise UserError(tensors)
    distributed.print0(
        f"{tensors}; training from scratch, which --freeze-backbone would ruin; for weights "
        "without a network: python recipes/imagenet.py"
    )


def try_to_fetch(name: str, fetch: Fetch) -> Tensors | str:
    """Return the tensors of --weights `name`, or a line that says why they cannot be had."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS)  # torch.hub would wait for ever
    try:
        return fetch()
    except DiskError:  # which a restart may find mended
        raise
    except UserError as error:
        return error.line
    except Exception as error:  # urllib, httpx and huggingface_hub have no common one
        return f"--weights {name}: download failed ({reason_of(error, 160)})"
    finally:
        socket.setdefaulttimeout(before)


def read_tensors(path: str) -> Tensors:
    """Return the tensors in a file of torch.save or safetensors, by their names and its keys."""
    try:
        with files.open_file(path, sys.maxsize) as file:
            is_safe = file.read(9)[8:] == b"{"  # of JSON, after its length
    except OSError as error:
        raise files.failure(path, error, "read") from None
    if is_safe:
        from safetensors.torch import load

        remedy = "use another file"
        return files.parse(path, load, "safetensors", remedy, sys.maxsize)
    tensors: dict[str, Tensor] = {}

    def flatten(content: Mapping[Any, Any], prefix: str) -> None:
        for key, value in content.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}{key}"] = value
            elif isinstance(value, Mapping):
                flatten(value, f"{prefix}{key}.")

    flatten(checkpoint.read_file(path, [Namespace]), "")
    return tensors


def find_published(arch: str, encoder: str, options: dict) -> dict[str, Fetch]:
    """Return what downloads published weights, by their names, the best first."""
    partial = functools.partial
    if arch in torchvision.models.list_models():
        choices = torchvision.models.get_model_weights(arch)
        # False comes before True: the default ones are the first
        return {
            each.name: partial(each.get_state_dict, progress=False, check_hash=True)
            for each in sorted(choices, key=lambda each: each is not choices.DEFAULT)
        }
    import timm

    if arch.startswith("timm/"):
        name = arch.removeprefix("timm/")
        own = timm.get_pretrained_cfg(name)
        if not own or not timm.is_model_pretrained(name):
            return {}
        build = partial(timm.create_model, name, pretrained=True, **options)
        return {own.tag or "default": partial(fetch, build)}
    if not encoder:
        return {}
    import segmentation_models_pytorch as smp

    if encoder.startswith("tu-"):  # of timm: its tag, if any, says which weights
        name = encoder.removeprefix("tu-")
        timm.get_pretrained_cfg(name)  # refuses a tag that there is not
        names = ["imagenet"] if timm.is_model_pretrained(name) else []
    else:
        about = smp.encoders.encoders.get(encoder, {})
        names = list(about.get("pretrained_settings") or ())
    return {
        name: partial(fetch, partial(smp.create_model, arch, encoder, name), "encoder.")
        for name in sorted(names, key=lambda name: name != "imagenet")
    }


def fetch(build: Callable[[], nn.Module], prefix: str = "") -> Tensors:
    """Return the tensors of the network that `build` makes with published weights.

    prefix: the names of those that are published begin so.
    """
    with reaching_hub(), torch.random.fork_rng([]):
        tensors = build().state_dict()
    return {key: value for key, value in tensors.items() if key.startswith(prefix)}


def reaching_hub() -> contextlib.AbstractContextManager:
    """Return `offline` unless the hub answers: its library would try for minutes."""
    import huggingface_hub as hub

    try:
        # any file will do, also one that is not there
        url = hub.hf_hub_url("timm/resnet18.a1_in1k", "config.json")
        hub.get_hf_file_metadata(url, timeout=SECONDS)
    except Exception as error:
        answer = getattr(error, "response", None)  # such as 404
        if answer is None or answer.status_code >= 500:
            return networks.offline()
    return contextlib.nullcontext()


def copy_matching(
    model: nn.Module, published: Tensors, source: str = "the file"
) -> None:
    """Copy the tensors whose names and shapes match; print how many, and which of `model` do not.

    Names match from some prefix on: in the file, such as `module.backbone.`, in `model`, or both.
    """
    mine = model.state_dict()
    theirs = {bare(name): value for name, value in published.items()}
    prefix, own = find_prefixes(mine, theirs)
    fitting = {}
    for name, weight in mine.items():
        value = theirs.get(prefix + bare(name).removeprefix(own), torch.empty(0))
        # a first layer for RGB, in a network for other channels
        if weight.ndim == value.ndim == 4 and weight.shape[1] != value.shape[1] == 3:
            from timm.models import adapt_input_conv  # its import takes half a second

            value = adapt_input_conv(weight.shape[1], value)
        if fits(value, weight):
            fitting[name] = value
    if not fitting:
        line = "--weights: no tensor matches this model in name and shape; the model"
        first = next(iter(published), "nothing")
        raise UserError(
            f"{line} begins with {next(iter(mine))}, {source} with {first}: is it from another "
            "--arch?"
        )
    model.load_state_dict(fitting, strict=False)
    share = sum(map(torch.numel, fitting.values())) / sum(
        map(torch.numel, mine.values())
    )
    start = f" from {prefix}*" if prefix else ""
    line = f"--weights: {len(fitting)} of {len(mine)} tensors loaded{start}"
    line += f", {100 * share:.4g} % of the model"
    new = [name for name in mine if name not in fitting]
    if new:
        line += f"; new: {shorten(new)}"
    distributed.print0(line)


def bare(name: str) -> str:
    """Return a tensor's name without what DDP and torch.compile put into it."""
    return re.sub(r"\b(module|_orig_mod)\.", "", name)


def fits(value: Tensor, weight: Tensor) -> bool:
    # torch would cut weights to whole numbers
    is_of_kind = value.is_floating_point() == weight.is_floating_point()
    return is_of_kind and value.shape == weight.shape


def find_prefixes(mine: Tensors, theirs: Tensors) -> tuple[str, str]:
    """Return what names of a file, and of the network, begin with where most of them match.

    One in the network is that of a wrapper, or of a part of which half or more match.
    """
    weights = {bare(name): weight for name, weight in mine.items()}
    starts = Counter(name.partition(".")[0] + "." for name in weights if "." in name)
    counts: Counter[tuple[str, str]] = Counter()
    for name, value in theirs.items():
        words = name.split(".")
        for number in range(len(words)):
            rest = ".".join(words[number:])
            for own in ("", *starts):
                weight = weights.get(own + rest)
                if weight is not None and fits(value, weight):
                    counts[name.removesuffix(rest), own] += 1

    def quality(prefixes: tuple[str, str]) -> tuple[int, ...]:
        """Return what is the least of the best: the most matches, then KEYS, then the shortest."""
        first = prefixes[0].partition(".")[0]
        rank = (*KEYS, first).index(first)
        return -counts[prefixes], rank, *map(len, prefixes)

    known = [each for each in counts if 2 * counts[each] >= starts[each[1]]]
    return min(known, key=quality, default=("", ""))
