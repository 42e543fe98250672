"""Checkpoints: plain types in `last.pt` and `best.pt`, written by rank 0, read by all."""

import pickle
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from engine import distributed, files
from engine.distributed import UserError

# All that a run writes into its folder, and so all that --resume never may remove.
OWN_FILES = (
    "last.pt",
    "best.pt",
    "metrics.csv",
    "args.json",
    "curves.png",
    "examples.png",
    "events.out.tfevents.*",
)
# Flags that do not change what is learnt: no need to tell that they are others now.
MAY_DIFFER = ("eval_only", "local_rank", "output_dir", "resume", "workers")


def open_run(
    args: Namespace, classes: Sequence[str], network_flags: Sequence[str]
) -> dict[str, Any] | None:
    """Prepare the output folder; return the checkpoint to go on from, None to start afresh.

    Raises a UserError if the folder cannot be written, or if the checkpoint cannot be read, is of
    another network (one of `network_flags` differs), of another optimizer or of other classes.
    With --eval-only nothing is written, and a checkpoint has to be there.
    """
    path = distributed.from_rank_zero(find, args.output_dir, args.resume, args.eval_only)
    if not path:
        return None
    state = load(path)
    old, new = state["args"], plain(args)
    remedy = "choose another --output-dir, or --resume never to start afresh"
    for name in (*network_flags, *([] if args.eval_only else ["optimizer"])):
        if old.get(name) != new[name]:
            raise UserError(f"{path} was trained with {flag(name, old)}, not {new[name]}: {remedy}")
    if state["classes"] != list(classes):
        raise UserError(
            f"{path} knows {len(state['classes'])} classes ({shorten(state['classes'])}), the data "
            f"has {len(classes)} ({shorten(classes)}): {remedy}"
        )
    line = f"{path}: {state['epoch']} of {args.epochs} epochs done, best {state['best']:.4f}"
    changed = [n for n in new if n in old and old[n] != new[n] and n not in MAY_DIFFER]
    if changed and not args.eval_only:
        line += f"; from now on {', '.join(f'{flag(n, new)} (was {old[n]})' for n in changed)}"
    distributed.say(line)
    return state


def flag(name: str, flags: dict[str, Any]) -> str:
    return f"--{name.replace('_', '-')} {flags.get(name)}"


def restore(state: dict[str, Any], optimizer: Optimizer, scheduler: LambdaLR) -> None:
    """Put optimizer and schedule where the checkpoint left them; rates and such are the flags'."""
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**state["optimizer"], "param_groups": settings})
    scheduler.load_state_dict({**state["scheduler"], "base_lrs": scheduler.base_lrs})
    factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
    for group, lr in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = lr * factor


def find(folder: Path, resume: str, eval_only: bool) -> Path | None:
    """Return the checkpoint that `resume` ("auto", "never" or a path) means; for rank 0 alone.

    "never" removes what a former run left in `folder`, and only that.
    """
    if resume not in ("auto", "never"):
        return Path(resume)
    if eval_only:
        return folder / "best.pt"
    with files.writing(folder / ".writable") as probe:  # or fail now, not after an epoch
        probe.touch()
    (folder / ".writable").unlink()
    if resume == "auto":
        return folder / "last.pt" if (folder / "last.pt").exists() else None
    if old := sorted(path for name in OWN_FILES for path in folder.glob(name)):
        print(f"--resume never: removing {', '.join(p.name for p in old)} from {folder}")
    for path in old:
        path.unlink()
    return None


def load_model(
    path: Path | str, build_model: Callable[..., nn.Module], device: torch.device
) -> tuple[nn.Module, list[str], Namespace]:
    """Return the network of a checkpoint, ready to predict, its class names and its flags."""
    state = load(path)
    flags = Namespace(**state["args"])
    model = build_model(flags, state["classes"])
    model.load_state_dict(state["model"])
    return model.eval().to(device), state["classes"], flags


def plain(args: Namespace) -> dict[str, Any]:
    """Return the flags as types that torch.load takes with weights_only=True."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}


def save(folder: Path, state: dict[str, Any], is_best: bool) -> None:
    """Write `state` as last.pt, and as best.pt if it is the best so far; on rank 0."""
    if not distributed.is_rank_zero():
        return
    for name in ["last.pt", "best.pt"] if is_best else ["last.pt"]:
        with files.writing(folder / name) as beside:
            torch.save(state, beside)


def load(path: Path | str) -> dict[str, Any]:
    """Return the checkpoint at `path`, tensors on the CPU; a UserError if it cannot be used."""
    state = load_file(path)
    if missing := sorted({"model", "epoch", "classes", "args"} - state.keys()):
        raise UserError(f"{path}: no checkpoint of this project ({', '.join(missing)} missing)")
    return state


def load_file(path: Path | str) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{path}: not a readable checkpoint ({reason[:120]})") from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: not a checkpoint but a {type(state).__name__}")
    return state


def shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def load_weights(path: str) -> dict[str, Tensor]:
    """Return the network's state dict from a checkpoint of ours or from a bare state dict."""
    state = load_file(path)
    return state.get("model", state)


def download_weights(arch: str, weights: str) -> dict[str, Tensor]:
    """Return the state dict of torchvision's `weights` (DEFAULT or another name) for `arch`."""
    choices = torchvision.models.get_model_weights(arch)
    if weights not in ["DEFAULT", *choices.__members__]:
        names = ", ".join(["DEFAULT", *choices.__members__])
        raise UserError(f"--weights {weights}: {arch} has {names}; or name a .pt file")
    try:
        with distributed.rank_zero_first():
            return choices[weights].get_state_dict(progress=False, check_hash=True)
    except OSError as error:
        raise UserError(f"--weights {weights}: download failed ({error})") from None


def load_matching(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load the tensors whose names and shapes `model` shares, and say which stay new."""
    own = model.state_dict()
    fitting = {k: v for k, v in weights.items() if k in own and own[k].shape == v.shape}
    if not fitting:
        raise UserError("--weights: not one tensor has a name and a shape of this network")
    model.load_state_dict(fitting, strict=False)
    new = [name for name in own if name not in fitting]
    line = f"--weights: {len(fitting)} of {len(own)} tensors loaded"
    distributed.say(f"{line}; new: {shorten(new)}" if new else line)
