"""Large images in tiles, and as a whole."""

import contextlib
import io
import random
import resource
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import model as task
import predict
from ddpkit.data import demo, loading
from ddpkit.ranks import failures
from ddpkit.run import checkpoint, machine
from flags import parse_args
from snippets.memory import status


def compared(path: str, side: int, tile: int) -> dict:
    """How far class maps and probabilities of a demo image differ, and the sides of what was seen.

    The network is made of the checkpoint's weights; it takes a large image of `side` pixels.
    """
    device = torch.device("cpu")
    net, _, flags, _ = checkpoint.open_model(path, task.build_model, parse_args, device)
    demo.CRACK_SIDE = side
    image = np.array(demo.draw_cracks(random.Random(0))[0])
    images = loading.normalize(torch.from_numpy(image).movedim(2, 0)[None])
    seen: list[int] = []
    forward = net.forward

    def noting(part: Tensor) -> Tensor:
        seen.append(part.shape[-1])
        return forward(part)

    net.forward = noting
    found = []
    with torch.inference_mode():
        for flags.tile in (tile, 0):
            found.append(task.infer(net, images, flags))
    parts, whole = (logits.softmax(1) for logits in found)
    return {
        "seen": seen,
        "others": (parts.argmax(1) != whole.argmax(1)).float().mean().item(),
        "mean": (parts - whole).abs().mean().item(),
        "differ": not torch.equal(parts, whole),
    }


def with_large(data: str, folder: str, image: str) -> None:
    """Copy the set `data`, with one more image for validation."""
    shutil.copytree(data, folder)
    shutil.copy(image, Path(folder, "val", "images"))
    with Image.open(image) as large:
        labels = np.arange(large.width * large.height).reshape(large.height, large.width) % 2
    mask = Path(folder, "val", "masks", Path(image).name)
    Image.fromarray(labels.astype(np.uint8)).save(mask)


def in_little_memory(folder: str, path: str, output: str, tile: int) -> list:
    """What predict.py lacks, 0 if nothing, and what it prints, if it may take another 600 MB."""
    open_model = checkpoint.open_model

    def open_and_limit(*args: object) -> tuple:
        found = open_model(*args)
        limit = 1024 * status("VmSize") + 600 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return found

    checkpoint.open_model, machine.default_workers = open_and_limit, lambda: 0
    words = [folder, "--checkpoint", path, "--output", output, "--tile", str(tile)]
    out, err = io.StringIO(), io.StringIO()
    code: str | int | None = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            predict.main(words)
        except RuntimeError as error:
            code = failures.out_of_memory(error)
    return [code, out.getvalue(), err.getvalue()]
