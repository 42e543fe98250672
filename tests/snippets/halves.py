"""The network on two devices of docs/recipes.md."""

from torch import Tensor, nn


class Halves(nn.Module):
    """Two halves, which may be on different devices; images and logits are on the first one's."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, images: Tensor) -> Tensor:
        half = self.first(images)
        return self.second(half.to(next(self.second.parameters()).device)).to(images.device)


def split(net: nn.Module) -> Halves:
    """That of docs/recipes.md, of a ShuffleNet, whose order of layers is that of its children."""
    layers = [*net.children()]
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(1)
    return Halves(nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:-1], *pool, layers[-1]))
