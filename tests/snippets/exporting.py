"""What export.py writes, and pieces of it."""

import json

import numpy as np
import onnxruntime
import torch

import model as task
from engine.data import loading
from engine.run import checkpoint


def used(folder: str, path: str, shape: list[int]) -> dict:
    """How far each file is from the network on images of a `shape`, and what it holds."""
    device = torch.device("cpu")
    net, classes, flags = checkpoint.open_model(path, task.build_model, task.add_arguments, device)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with torch.inference_mode():
        expected = net(loading.normalize(torch.from_numpy(images)))
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
    (logits,) = session.run(["logits"], {"images": images})
    extra = {"metadata.json": ""}
    program = torch.export.load(f"{folder}/model.pt2", extra_files=extra)
    found = program.module()(torch.from_numpy(images))
    held = session.get_modelmeta().custom_metadata_map
    onnx = {name: json.loads(held[name]) for name in json.loads(extra["metadata.json"])}
    return {
        "apart": [(torch.as_tensor(x) - expected).abs().max().item() for x in (logits, found)],
        "largest": expected.abs().max().item(),
        "type": str(logits.dtype),
        "metadata": [onnx, json.loads(extra["metadata.json"])],
        "classes": list(classes),
        "image_size": flags.image_size,
    }
