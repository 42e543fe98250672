"""What an owner may add to main.py, by a line that imports it there."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

import dataset
import model
from dataset import draw_example
from ddpkit.run import flags
from model import build_criterion, build_metrics, build_model


class Soft(torch.utils.data.Dataset):
    """Soft labels for six classes."""

    def __init__(self, dataset: dataset.ImageDataset) -> None:
        self.dataset, self.samples = dataset, dataset.samples

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.dataset[index]
        return image, torch.full((6,), 0.02).index_fill(0, torch.tensor(label), 0.9)


def hardened_metrics(classes: list[str]) -> MetricCollection:
    metrics = build_metrics(classes)
    metrics.update = lambda outputs, targets: MetricCollection.update(
        metrics, outputs, targets.argmax(1)
    )
    return metrics


def draw_hardened(axes: object, image: Tensor, target: Tensor, *more: object) -> None:
    draw_example(axes, image, target.argmax(), *more)


class Several(nn.Module):
    """A network that returns several outputs in training."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> object:
        logits = self.net(images)
        if self.training:
            return {"out": logits, "aux": (logits.bfloat16(), 1)}
        return logits


def build_several(*args: object, **more: object) -> nn.Module:
    return Several(build_model(*args, **more))


class OfSeveral(nn.Module):
    def __init__(self, *args: object) -> None:
        super().__init__()
        self.criterion = build_criterion(*args)

    def forward(self, outputs: object, targets: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(outputs, Tensor):
            return self.criterion(outputs, targets)
        assert outputs["aux"][0].dtype == torch.float32
        loss, count = self.criterion(outputs["out"], targets)
        return loss + 0.4 * self.criterion(outputs["aux"][0], targets)[0], count


def change_dots(change: Callable[[Tensor, Tensor], tuple]) -> None:
    """Have the data set change what it returns for the class "dots"."""
    get = dataset.ImageDataset.__getitem__

    def changed(self: dataset.ImageDataset, index: int) -> tuple:
        image, label = get(self, index)
        return change(image, label) if "/dots/" in self.samples[index][0] else (image, label)

    dataset.ImageDataset.__getitem__ = changed


def narrow_dots() -> None:
    change_dots(lambda image, label: (image[:, :60], label))


def mislabel_dots() -> None:
    change_dots(lambda image, label: (image, torch.tensor(6)))


def add_flags() -> None:
    """Give the network two more flags."""
    build, parse = model.build_model, flags.Parser.parse

    def more(self: flags.Parser, *words: object) -> Namespace:
        if "--arch" in self._option_string_actions and "--drop" not in self._option_string_actions:
            self.add_argument("--drop", type=float, default=0.25)
            self.add_argument("--folder", type=Path, default="here")
        return parse(self, *words)

    def checked(args: Namespace, *rest: object, **more: object) -> nn.Module:
        assert args.drop in (0.25, 0.5)
        assert (args.folder / "it").name == "it"
        return build(args, *rest, **more)

    model.build_model, flags.Parser.parse = checked, more
