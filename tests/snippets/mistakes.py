"""What the metrics of model.py share."""

import warnings

import torch
from matplotlib.figure import Figure

import dataset
import model
from ddpkit.ranks import distributed
from ddpkit.run import metrics


def shared_counts() -> dict:
    """The groups of metrics that count once, and the counts over two evaluations of 3 batches."""
    distributed.setup()
    collection = model.build_metrics(["a", "b"])
    sides = (8, 8) if "iou" in collection else ()
    found, expected = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            collection.reset()
            counts = torch.zeros(2, 2, dtype=torch.long)
            for _ in range(3):
                outputs = torch.randn(5, 2, *sides)
                targets = torch.randint(0, 2, (5, *sides))
                collection.update(outputs, targets)
                pairs = 2 * targets + outputs.argmax(1)
                counts += pairs.flatten().bincount(minlength=4).view(2, 2)
            numbers, confusion = metrics.compute(collection)
            assert all(type(number) is float for number in numbers.values())
            found.append(confusion.tolist())
            expected.append(counts.tolist())
    groups = sorted(map(sorted, collection.compute_groups.values()))
    return {"found": found, "expected": expected, "groups": groups}


def drawn_size(height: int, width: int) -> list[int]:
    """The size at which an image, padded as for validation, is drawn beside its masks."""
    axes = Figure().add_subplot()
    image = dataset.pad(torch.full((3, height, width), 7, dtype=torch.uint8), 0)
    target = dataset.pad(torch.zeros(height, width, dtype=torch.uint8), 255)
    output = torch.zeros(2, *target.shape)
    dataset.draw_example(axes, image, target, output, ["a", "b"])
    return list(axes.images[0].get_size())
