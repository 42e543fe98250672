"""What export.py writes, and pieces of it."""

import json

import numpy as np
import onnxruntime
import torch

import model
from ddpkit.data import loading
from ddpkit.run import checkpoint
from flags import parse_args


def used(folder: str, path: str, shapes: list[list[int]]) -> dict:
    """How far each file is from the network on images of each of `shapes`, and what it holds."""
    device = torch.device("cpu")
    net, classes, args, _ = checkpoint.open_model(path, model.build_model, parse_args, device)
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
    extra = {"metadata.json": ""}
    program = torch.export.load(f"{folder}/model.pt2", extra_files=extra).module()
    apart, largest = [], []
    for shape in shapes:
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        with torch.inference_mode():
            expected = net(loading.normalize(torch.from_numpy(images)))
        (logits,) = session.run(["logits"], {"images": images})
        both = torch.as_tensor(logits), program(torch.from_numpy(images))
        apart.append([(each - expected).abs().max().item() for each in both])
        largest.append(expected.abs().max().item())
    held = session.get_modelmeta().custom_metadata_map
    onnx = {name: json.loads(held[name]) for name in json.loads(extra["metadata.json"])}
    return {
        "apart": apart,
        "largest": largest,
        "type": str(logits.dtype),
        "metadata": [onnx, json.loads(extra["metadata.json"])],
        "classes": list(classes),
        "image_size": args.image_size,
    }
