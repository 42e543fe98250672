"""Loss and metrics of a checkpoint, counted by a plain loop, and the flags of --eval-only."""

import argparse
import contextlib
from pathlib import Path

import torch

import dataset
import main
import model
from engine.ranks import distributed

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def plain_loop(checkpoint: str, data: str) -> dict:
    """The mean loss, and each guess with its truth."""
    state = torch.load(checkpoint, weights_only=True)
    args = argparse.Namespace(**state["args"])
    distributed.setup()
    _, val, classes = dataset.build_dataset(Path(data), args.image_size)
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
    """What --eval-only evaluates `checkpoint` with, saved with another size and limit, by flag."""
    state = torch.load(checkpoint, weights_only=True)
    state["args"].update(image_size=96, max_megapixels=7, tile=256, batch_size=3)
    torch.save(state, out)
    found: dict = {}

    def evaluate(task: main.Task, _: object) -> None:
        found.update(vars(task.args))
        raise KeyboardInterrupt

    main.evaluate = evaluate
    with contextlib.suppress(KeyboardInterrupt):
        main.main(["--eval-only", "--resume", out, "--workers", "0", *words])
    names = "image_size", "max_megapixels", "tile", "arch", "batch_size"
    return {name: found.get(name) for name in names}
