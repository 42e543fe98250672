"""Loss and metrics of a checkpoint, counted by a plain loop, and the flags of --eval-only."""

import contextlib
from argparse import Namespace

import torch

import dataset
import flags
import main
import model

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def plain_loop(checkpoint: str, data: str) -> dict:
    """The mean loss, and each guess with its truth."""
    state = torch.load(checkpoint, weights_only=True)
    args = flags.parse_args(["--data", data], state["args"])
    main.distributed.setup(seed=0)
    _, val, classes = dataset.build_datasets(args)
    net = model.build_model(args, classes)
    net.load_state_dict(state["model"])
    net.eval()
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    losses, pairs = 0.0, []
    for image, label in val:
        target = torch.as_tensor(label).long()
        with torch.no_grad():
            output = net(((image / 255 - mean) / std)[None])[0]
        scores = output.flatten(1).T.double() if output.ndim == 3 else output[None].double()
        target = target.flatten() if output.ndim == 3 else target[None]
        keep = target != 255
        picked = torch.log_softmax(scores[keep], 1)[torch.arange(int(keep.sum())), target[keep]]
        losses -= picked.sum().item()
        pairs += zip(scores[keep].argmax(1).tolist(), target[keep].tolist(), strict=True)
    return {"loss": losses / len(pairs), "pairs": pairs}


def flags_of_eval_only(checkpoint: str, out: str, *words: str) -> dict:
    """What --eval-only evaluates `checkpoint` with, saved with another size, by flag."""
    state = torch.load(checkpoint, weights_only=True)
    state["args"].update(image_size=96, batch_size=3)
    if "tile" in state["args"]:
        state["args"]["tile"] = 256
    torch.save(state, out)
    found: dict = {}

    def evaluate(*_: object, args: Namespace, **more: object) -> None:
        found.update(vars(args))
        raise KeyboardInterrupt

    main.evaluate = evaluate
    with contextlib.suppress(KeyboardInterrupt):
        main.main(["--eval-only", "--resume", out, "--workers", "0", *words])
    names = "image_size", "tile", "arch", "batch_size"
    return {name: found.get(name) for name in names}
