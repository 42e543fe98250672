"""Does recipes/digits.txt beat what needs no network, and a plain loop of the same CPU time?

scikit-learn's digits, the split of recipes/digits.py: 1,437 to train, 360 for validation. Nearest
neighbours and a support vector machine see the raw pixels. The plain loop is what one writes first:
ResNet-18, the same images enlarged to 32 pixels, all in memory, AdamW, no augmentation; it trains
for as much CPU time as the recipe took, and like the recipe is scored by its best epoch.

    pip install scikit-learn
"""

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np
import torch
import torchvision
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC
from torch import nn

TRAIN = 1437  # images


def train(project: Path, output: Path, words: list) -> None:
    command = [sys.executable, project / "main.py", "--output-dir", output]
    common.run([*command, *words], timeout=7200, cwd=project)


def of_recipe(project: Path, seed: int, more: list[str]) -> tuple[float, float]:
    """Return the best top1, and the CPU seconds of all its processes."""
    common.run([sys.executable, "recipes/digits.py"], cwd=project)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="benchmark-run-") as output:
        words = ["@recipes/digits.txt", "--data", "data/digits", "--seed", seed, *more]
        train(project, Path(output), words)
        rows = common.rows(Path(output))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return max(float(row["top1"]) for row in rows), seconds


def of_plain_loop(
    images: np.ndarray, labels: np.ndarray, seed: int, seconds: float
) -> float:
    """Return the best top1 of as many epochs as fit into so many CPU seconds."""
    end = time.process_time() + seconds
    torch.manual_seed(seed)
    planes = torch.tensor(images).float().div(16).sub(0.5).view(-1, 1, 8, 8)
    pixels = nn.functional.interpolate(planes, size=32, mode="bilinear")
    pixels = pixels.expand(-1, 3, -1, -1)
    truth = torch.tensor(labels)
    model = torchvision.models.resnet18(num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), 0.001)
    best = 0.0
    while time.process_time() < end:
        model.train()
        for batch in torch.randperm(TRAIN).split(64):
            loss = nn.functional.cross_entropy(model(pixels[batch]), truth[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            found = model(pixels[TRAIN:]).argmax(1)
        best = max(best, float((found == truth[TRAIN:]).float().mean()))
    return best


def of_classic(model: object, images: np.ndarray, labels: np.ndarray) -> float:
    model.fit(images[:TRAIN], labels[:TRAIN])  # type: ignore[attr-defined]
    return model.score(images[TRAIN:], labels[TRAIN:])  # type: ignore[attr-defined]


def main() -> None:
    parser = common.parser(__doc__, ("classification",))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--flags", default="", help="after the recipe's")
    given = parser.parse_args()
    common.say_machine(given)
    images, labels = load_digits(return_X_y=True)
    found: dict[str, list[float]] = {"recipes/digits.txt": [], "plain loop": []}
    seconds = []
    with common.generated(given.task) as folder:
        for seed in given.seeds:
            top1, took = of_recipe(folder / "project", seed, given.flags.split())
            found["recipes/digits.txt"].append(top1)
            seconds.append(took)
            plain = of_plain_loop(images, labels, seed, took)
            found["plain loop"].append(plain)
    classic: dict[str, Callable[[], object]] = {
        "3 nearest neighbours": lambda: KNeighborsClassifier(3),
        "support vector machine": SVC,
    }
    for name, build in classic.items():
        found[name] = [of_classic(build(), images, labels)]
    lines = [("classifier", "top1, mean", "min..max")]
    for name, scores in found.items():
        ends = f"{min(scores):.3f}..{max(scores):.3f}"
        lines.append((name, f"{statistics.mean(scores):.3f}", ends))
    common.markdown(lines)
    print(f"\nCPU seconds of a run: {statistics.mean(seconds):.0f}")


if __name__ == "__main__":
    main()
