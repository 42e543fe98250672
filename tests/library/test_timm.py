"""--arch timm/NAME: its own mean, deviation and crop; rates and decay by layer."""

import csv
import json
import math
import os
import signal
from pathlib import Path

import pytest
import timm.optim
import torch
from digest import digest
from generated import Project, after_step
from ranks import on_ranks

import recipe
from flags import parse_args
from model import build_model, layers

VIT = "--arch", "timm/test_vit", "--image-size", "32"


def test_rates_and_decay_of_layers() -> None:
    """As timm groups them; embeddings, biases and norms do not decay."""
    args = parse_args(
        [*VIT, "--layer-decay", "0.5", "--lr", "1", "--weight-decay", "0.1"]
    )
    net = build_model(args, ["one", "two"])
    expected = {
        name: (group["lr"], group["weight_decay"])
        for group in timm.optim.create_optimizer_v2(
            net, "adamw", lr=1, weight_decay=0.1, layer_decay=0.5
        ).param_groups
        for weight in group["params"]
        for name, each in net.named_parameters()
        if each is weight
        for group in [{**group, "lr": group["lr_scale"]}]
    }
    found = {}
    name_of = {weight: name for name, weight in net.named_parameters()}
    for group in recipe.build_optimizer(net, args).param_groups:
        for weight in group["params"]:
            found[name_of[weight]] = group["lr"], group["weight_decay"]
    assert found.keys() == expected.keys()
    assert all(found[name] == pytest.approx(expected[name]) for name in found)
    assert found["head.weight"] == (1, 0.1) and found["pos_embed"][1] == 0
    assert len(layers(net)) > 3


def test_a_run(project: Project, few: Path, tmp_path: Path) -> None:
    more = (
        "--layer-decay",
        0.7,
        "--drop-path",
        0.3,
        "--grad-checkpointing",
        "--save-every",
        1,
    )
    words = *VIT, *more, "--freeze-backbone", 1, "--epochs", 2
    kill = after_step(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    project.train(few, tmp_path / "whole", *words).ok()
    assert project.train(few, tmp_path / "killed", *words, patch=kill).status == -9
    project.train(few, tmp_path / "killed", *words).ok()
    assert digest(tmp_path / "whole") == digest(tmp_path / "killed")
    state = torch.load(tmp_path / "whole/best.pt", weights_only=True)
    config = timm.get_pretrained_cfg("test_vit")
    assert state["format"]["mean"] == config.mean == (0.5, 0.5, 0.5)
    assert state["args"]["crop"] == config.crop_pct == 0.95
    timm.create_model("test_vit", num_classes=6, img_size=32).load_state_dict(
        state["model"]
    )
    words = tmp_path / "whole", *VIT, "--eval-only"
    said = [
        project.train(few, *words, on=ranks).ok().out.splitlines()[-1]
        for ranks in (1, 3)
    ]
    assert json.loads(said[0]) == pytest.approx(json.loads(said[1]), rel=1e-6)
    words = (
        few / "val",
        "--checkpoint",
        tmp_path / "whole/best.pt",
        "--output",
        tmp_path / "p",
    )
    project.run(*words, script="predict.py", on=1).ok()
    with open(tmp_path / "p/predictions.csv", newline="") as file:
        found = [
            {**row, "name": Path(row["file"]).parent.name}
            for row in csv.DictReader(file)
        ]
    losses = [
        -math.log(max(float(row[f"probability_{row['name']}"]), 1e-9)) for row in found
    ]
    loss = json.loads(said[0])["val_loss"]
    # of the same pixels
    assert sum(losses) / len(losses) == pytest.approx(loss, abs=1e-3)


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
    project: Project, few: Path, tmp_path: Path, words: str, said: str
) -> None:
    project.train(few, tmp_path, *words.split(), on=1).refused("", said)


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@on_ranks(1)
def test_dpt_on_a_vit(project: Project) -> None:
    """dpt takes one; the error of other decoders names it."""
    import model
    from ddpkit.run import networks
    from flags import parse_args

    words = "--encoder", "tu-vit_small_patch16_dinov3", "--image-size", "64", "--arch"
    with pytest.raises(ValueError) as error:
        model.build_model(parse_args([*words, "unet"]), ["one", "two"])
    line = str(networks.explain(error.value))
    assert "--arch unet" in line and "--arch dpt" in line
    net = model.build_model(parse_args([*words, "dpt"]), ["one", "two"])
    assert net(torch.zeros(2, 3, 64, 96)).shape == (2, 2, 64, 96)
    assert all(map(len, model.layers(net)))
