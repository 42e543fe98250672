"""Random configurations of a run: flags that go together, with the data that they are for."""

import random
from dataclasses import dataclass
from pathlib import Path

from setting import Setting

TASKS = "classification", "classification", "several labels", "segmentation"
NETWORKS = {
    "classification": [
        ["--arch", "shufflenet_v2_x0_5"],
        ["--arch", "squeezenet1_1"],
        ["--arch", "mobilenet_v3_small"],
        ["--arch", "timm/test_vit", "--image-size", "160", "--layer-decay", "0.7"],
        ["--arch", "timm/test_vit", "--image-size", "160", "--drop-path", "0.2"],
        ["--arch", "timm/test_resnet", "--grad-checkpointing"],
    ],
    "segmentation": [
        ["--arch", "linknet", "--encoder", "tu-mobilenetv2_035"],
        ["--arch", "fpn", "--encoder", "tu-mobilenetv2_035", "--layer-decay", "0.5"],
        ["--arch", "unet", "--encoder", "timm-mobilenetv3_small_minimal_100"],
    ],
}
AUGMENTATIONS = {
    "classification": "trivial,rand,color,grey,rotation,vflip,erasing,mixup,cutmix",
    "segmentation": "color,grey,rotation,vflip",
}
LOSSES = "ce", "dice", "focal", "lovasz", "ce+dice", "ce+0.5*lovasz"
# muon takes seconds per step on CPUs
OPTIMIZERS = "adamw", "adamw", "sgd", "lamb", "lion", "adafactor", "nadamw"


@dataclass
class Configuration:
    task: str  # of the project
    data: str  # its name in Setting.data
    ranks: int
    flags: list[str]
    draws: bool  # draws the images of what was learnt, which takes time

    def __str__(self) -> str:
        return f"{self.data}, {self.ranks} rank(s), {' '.join(self.flags)}"

    def words(self, setting: Setting, save_every: object, out: Path) -> list[object]:
        own = ["--save-every", save_every, "--output-dir", out]
        return ["--data", setting.data[self.data], self.flags, own]


def draw(chance: random.Random) -> Configuration:
    data = chance.choice(TASKS)
    task = "segmentation" if data == "segmentation" else "classification"
    ranks = chance.choice([1, 2, 2, 2, 3])
    flags = ["--weights", "none", "--image-size", chance.choice(["32", "64"])]
    flags += ["--epochs", chance.choice("233"), "--batch-size", chance.choice("234")]
    flags += ["--workers", chance.choice("0002"), "--seed", str(chance.randrange(1000))]
    flags += chance.choice(NETWORKS[task])  # a second --image-size stands for the first
    flags += sometimes(chance, 0.3, "--accumulate", "2")
    flags += sometimes(chance, 0.3, "--ema", chance.choice(["0.5", "0.99"]))
    flags += sometimes(chance, 0.7, "--optimizer", chance.choice(OPTIMIZERS))
    flags += sometimes(
        chance, 0.3, "--schedule", chance.choice(["step", "poly", "wsd"])
    )
    flags += sometimes(chance, 0.3, "--clip-grad-norm", "1")
    flags += sometimes(chance, 0.2, "--freeze-backbone", "1")
    flags += sometimes(chance, 0.2, "--class-weights", "auto")
    flags += sometimes(chance, 0.2, "--fold", chance.choice(["1/3", "2/3"]))
    flags += sometimes(chance, 0.2, "--patience", "1")
    flags += sometimes(chance, 0.2, "--tta")
    flags += sometimes(chance, 0.1, "--deterministic")
    some = chance.sample(AUGMENTATIONS[task].split(","), chance.randrange(1, 4))
    flags += sometimes(chance, 0.5, "--augment", ",".join(some))
    if task == "segmentation":
        flags += sometimes(chance, 0.6, "--loss", chance.choice(LOSSES))
    else:
        flags += sometimes(chance, 0.2, "--label-smoothing", "0.1")
    return Configuration(task, data, ranks, flags, draws=chance.random() < 0.1)


def sometimes(chance: random.Random, how_often: float, *flags: str) -> list[str]:
    return list(flags) if chance.random() < how_often else []
