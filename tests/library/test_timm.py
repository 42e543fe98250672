"""--arch timm/NAME: its own mean, deviation and crop; rates and decay by layer."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch
from digest import digest
from generated import Done, Project, after_step, die
from ranks import on_ranks

import recipe
from flags import parse_args
from model import build_model, layers

VIT = "--arch timm/test_vit --image-size 32"


def test_rates_and_decay_of_layers() -> None:
    """As timm groups them; embeddings, biases and norms do not decay."""
    words = f"{VIT} --layer-decay 0.5 --lr 1 --weight-decay 0.1"
    args = parse_args(words.split())
    net = build_model(args, ["one", "two"])
    name_of = {weight: name for name, weight in net.named_parameters()}

    def by_name(optimizer: torch.optim.Optimizer, rate: str) -> dict:
        return {
            name_of[weight]: (group[rate], group["weight_decay"])
            for group in optimizer.param_groups
            for weight in group["params"]
        }

    theirs = timm.optim.create_optimizer_v2(
        net, "adamw", lr=1, weight_decay=0.1, layer_decay=0.5
    )
    expected = by_name(theirs, "lr_scale")
    found = by_name(recipe.build_optimizer(net, args), "lr")
    assert found.keys() == expected.keys()
    assert all(found[name] == pytest.approx(expected[name]) for name in found)
    assert found["head.weight"] == (1, 0.1)
    assert found["pos_embed"][1] == 0
    assert len(layers(net)) > 3


@pytest.mark.parametrize("arch", ["tf_efficientnet_lite0", "mobilenetv3_small_050"])
def test_the_last_layer_starts_small(arch: str) -> None:
    """As torch draws a Linear, with any number of classes; timm alone: 20 times as large."""
    args = parse_args(["--arch", f"timm/{arch}"])
    head = build_model(args, ["one", "two"]).get_classifier()
    assert head.weight.abs().max() <= head.in_features**-0.5


def test_a_run(project: Project, few: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"

    def train(out: Path, words: str, **options: Any) -> Done:
        return project.train(few, out, f"{VIT} {words}".split(), **options)

    words = "--epochs 2 --save-every 1 --freeze-backbone 1"
    words += " --layer-decay 0.7 --drop-path 0.3 --grad-checkpointing"
    train(whole, words).ok()
    kill = after_step(5, die)
    assert train(killed, words, patch=kill).status == -9
    train(killed, words).ok()
    assert digest(whole) == digest(killed)
    state = torch.load(whole / "best.pt", weights_only=True)
    config = timm.get_pretrained_cfg("test_vit")
    assert state["format"]["mean"] == config.mean == (0.5, 0.5, 0.5)
    assert state["args"]["crop"] == config.crop_pct == 0.95
    net = timm.create_model("test_vit", num_classes=6, img_size=32)
    net.load_state_dict(state["model"])
    said = train(whole, "--eval-only --json", on=1).ok().out
    one = json.loads(said.splitlines()[-1])
    said = train(whole, "--eval-only --json", on=3).ok().out
    three = json.loads(said.splitlines()[-1])
    assert one == pytest.approx(three, rel=1e-6)
    more = "--checkpoint", whole / "best.pt", "--output", tmp_path / "p"
    project.run(few / "val", more, script="predict.py", on=1).ok()
    losses = []
    with open(tmp_path / "p/predictions.csv", newline="") as file:
        for row in csv.DictReader(file):
            label = Path(row["file"]).parent.name
            losses.append(-math.log(float(row[f"probability_{label}"])))
    # of the same pixels
    assert sum(losses) / len(losses) == pytest.approx(one["val_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--arch timm/test_vitt", "timm/test_vit"),
        ("--arch timm/test_vit.none", "Invalid pretrained tag"),
        ("--arch resnet18 --drop-path 0.1", "--arch timm/NAME"),
        ("--arch timm/test_vit --image-size 40", "40"),
    ],
)
def test_what_cannot_be(
    project: Project,
    few: Path,
    tmp_path: Path,
    words: str,
    said: str,
) -> None:
    project.train(few, tmp_path, words.split(), on=1).refused("", said)


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@on_ranks(1)
def test_dpt_on_a_vit(project: Project) -> None:
    """dpt takes one; the error of other decoders names it."""
    import model
    from ddpkit.vision import networks
    from flags import parse_args

    def build(arch: str) -> torch.nn.Module:
        words = f"--encoder tu-vit_small_patch16_dinov3 --image-size 64 --arch {arch}"
        return model.build_model(parse_args(words.split()), ["one", "two"])

    with pytest.raises(ValueError) as error:
        build("unet")
    line = str(networks.explain_network(error.value))
    assert "--arch unet" in line
    assert "--arch dpt" in line
    net = build("dpt")
    assert net(torch.zeros(2, 3, 64, 96)).shape == (2, 2, 64, 96)
    layers = model.layers(net)
    assert len(layers) == 2
    assert all(map(len, layers))
