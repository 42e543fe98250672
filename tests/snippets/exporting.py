"""What an exported file computes, and what it holds."""

import json

import numpy as np
import onnxruntime
import torch

import model
from ddpkit.data import loading
from ddpkit.run import checkpoint
from flags import parse_args


def used(folder: str, path: str, shapes: list[list[int]]) -> dict:
    """How far the file is from the network on images of each of `shapes`, and what it holds."""
    device = torch.device("cpu")
    net, classes, args, _ = checkpoint.open_model(path, model.build_model, parse_args, device)
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
    apart, largest = [], []
    for shape in shapes:
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        with torch.inference_mode():
            expected = net(loading.normalize(torch.from_numpy(images)))
        (logits,) = session.run(["logits"], {"images": images})
        apart.append((torch.as_tensor(logits) - expected).abs().max().item())
        largest.append(expected.abs().max().item())
    held = session.get_modelmeta().custom_metadata_map
    names = "classes arch size multiple_of mean std"
    return {
        "apart": apart,
        "largest": largest,
        "type": str(logits.dtype),
        "metadata": {name: json.loads(held[name]) for name in names.split()},
        "classes": list(classes),
        "arch": args.arch,
        "image_size": args.image_size,
    }
