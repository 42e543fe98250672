"""What the metrics of model.py share."""

import warnings

import torch

import model
from engine.ranks import distributed
from engine.run import metrics


def shared_counts() -> dict:
    """The groups of metrics that count once, and the counts over two evaluations of 3 batches."""
    distributed.setup()
    collection = model.build_metrics(["a", "b"])
    sides = (8, 8) if hasattr(model, "STRIDE") or "iou" in collection else ()
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
