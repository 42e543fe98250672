"""Trains as main.py does, with a network of two layers, which takes little time to compile."""

from torch import nn

import main
from engine.ranks import failures


def build_model(args: object, classes: list[str], weights: str | None = None) -> nn.Module:
    ends = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 8, 3, 4), *ends, nn.Linear(8, len(classes)))


main.build_model = build_model
with failures.one_line_errors():
    main.main()
