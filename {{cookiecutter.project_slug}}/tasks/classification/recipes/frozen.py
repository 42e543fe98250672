"""Print the top1 of a logistic regression on frozen features: a baseline in minutes.

    python recipes/frozen.py --data DIR --arch timm/NAME --weights FILE --image-size 128

Prints top1 on the validation set for each C, and for the best C a table of the classes: precision,
recall and f1, with their images. Writes predictions.csv, per_class.csv and images of that C to
frozen/eval in --output-dir, as --eval-only of main.py does. --eval-only test: chooses C on the
validation set, and evaluates it on the test set.

The flags are those of main.py; --epochs and others that concern training have no effect. Splits,
image size and normalisation are those of a training, and training images are seen as those of
validation, without augmentation. The features of an image are timm's, mean and maximum over the
image; of torchvision's models, what the last layer gets. C is as in scikit-learn: a smaller one is
a stronger L2 penalty. Uses one process, and saves no checkpoint.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ddpkit
from flags import parse_args

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.before_imports(parse_args)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ddp
from dataset import build_datasets, draw_example, val_transform
from model import build_metrics, build_model, check_flags

PENALTIES = 0.001, 0.003, 0.01, 0.03, 0.1  # C


def main(argv: Sequence[str] | None = None) -> None:
    begin = time.monotonic()
    args = parse_args(argv)
    device = ddp.setup(args.local_rank, args)
    if dist.get_world_size() > 1:
        raise ddpkit.UserError("frozen.py is for one process: start it with python")
    check_flags(args, args.weights)
    part = args.eval_only
    args.eval_only = None  # C is chosen on the validation set
    train_set, val_set, classes = build_datasets(args)
    if args.several_labels:
        raise ddpkit.UserError(
            "frozen.py needs one label per image, and these have several: use main.py with "
            "--freeze-backbone"
        )
    train_set.transform = val_transform(args.image_size, args.crop)
    test_set = val_set
    if part == "test":
        args.eval_only = part
        _, test_set, _ = build_datasets(args)
    train_loader, val_loader, test_loader = (
        ddpkit.val_loader(
            each, args.batch_size, classes=classes, seed=args.seed, workers=args.workers
        )
        for each in (train_set, val_set, test_set)
    )
    model = load(args, classes, val_loader.channels).to(device)
    model = model.to(memory_format=ddp.memory_layout(device))
    inputs, labels, _ = features(model, train_loader)
    val_inputs, val_labels, indices = features(model, val_loader)
    deviation, mean = torch.std_mean(inputs, 0, correction=0)
    deviation[deviation < 1e-6] = 1  # features that are always zero
    inputs = (inputs - mean) / deviation
    val_inputs = (val_inputs - mean) / deviation
    counts = f"{len(labels)} training + {len(val_labels)} validation images"
    print(f"{counts} | {inputs.shape[1]} features")
    print(f"{'C':<8}{'top1':<8}{'balanced accuracy'}", flush=True)
    scores = {}
    found = {}
    # the last row has the biases; each C continues from the one before
    weights = inputs.new_zeros(inputs.shape[1] + 1, len(classes))
    for penalty in PENALTIES:
        weights = found[penalty] = fit(inputs, labels, penalty, weights)
        is_right = (logits(val_inputs, weights).argmax(1) == val_labels).double()
        scores[penalty] = is_right.mean().item()
        recalls = [
            is_right[val_labels == label].mean() for label in val_labels.unique()
        ]
        balanced = torch.stack(recalls).mean()
        print(f"{penalty:<8g}{scores[penalty]:<8.4f}{balanced:.4f}", flush=True)
    best = max(scores, key=scores.__getitem__)

    def predict(model: nn.Module, images: Tensor) -> Tensor:
        return logits((extract(model, images).cpu() - mean) / deviation, found[best])

    name = "validation"
    if part == "test":
        name = part
        val_loader = test_loader
        val_inputs, val_labels, indices = features(model, val_loader)
        val_inputs = (val_inputs - mean) / deviation
    print(f"C {best:g}, {len(val_labels)} {name} images:", flush=True)
    outputs = logits(val_inputs, found[best])
    metrics = build_metrics(args, classes)
    metrics.update(outputs, val_labels)
    worst = ddpkit.TopLosses(outputs.device, every=True)
    worst.update(outputs, val_labels, indices)
    folder = args.output_dir / "frozen"
    report = ddpkit.Reporter(folder, 0, classes, predict=predict, draw=draw_example)
    evaluation = *ddpkit.compute_metrics(metrics), worst.compute()
    report.write_evaluation(evaluation, model, val_loader, args.json)
    seconds = time.monotonic() - begin
    print(f"done: best top1 {scores[best]:.4f} with C {best:g}, after {seconds:.0f} s")


def load(args: Namespace, classes: Sequence[str], channels: int) -> nn.Module:
    """Return the network with pretrained weights, without which features mean little."""
    torch.manual_seed(args.seed)
    untrained = build_model(args, classes, channels)
    torch.manual_seed(args.seed)
    model = build_model(args, classes, channels, args.weights)
    if torch.equal(next(model.parameters()), next(untrained.parameters())):
        raise ddpkit.UserError(
            f"--weights {args.weights}: frozen.py needs pretrained weights, and none were "
            "loaded; offline use --weights FILE, such as that of recipes/imagenet.py"
        )
    return model


@torch.no_grad()
def features(model: nn.Module, loader: DataLoader) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features of all images, float32 (images, features), their labels and indices."""
    rows = []
    labels = []
    indices = []
    for images, targets, *_, numbers in ddpkit.eval_batches(loader, model):
        rows.append(extract(model, images).float().cpu())
        labels.append(targets.cpu())
        indices.append(numbers.cpu())
    return torch.cat(rows), torch.cat(labels), torch.cat(indices)


def extract(model: nn.Module, images: Tensor) -> Tensor:
    if hasattr(model, "forward_features"):  # timm's
        maps = model.forward_features(images)  # type: ignore[operator]
        # (N, C, H, W), (N, H, W, C) or (N, tokens, C)
        maps = maps.movedim(maps.shape.index(model.num_features, 1), 1)
    else:
        found: list[Tensor] = []
        layers = [
            each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)
        ]
        with layers[-1].register_forward_pre_hook(lambda _, given: found.extend(given)):
            model(images)
        maps = found[0]
    if maps.ndim == 2:
        return maps
    maps = maps.flatten(2)
    return torch.cat([maps.mean(2), maps.amax(2)], 1)


def logits(inputs: Tensor, weights: Tensor) -> Tensor:
    return inputs @ weights[:-1] + weights[-1]


def fit(inputs: Tensor, labels: Tensor, penalty: float, start: Tensor) -> Tensor:
    """Return the weights of a multinomial logistic regression, as scikit-learn's with this C."""
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=1000,
        tolerance_grad=1e-4,  # scikit-learn's
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        squares = weights[:-1].square().sum() / (2 * penalty * len(labels))
        value = nn.functional.cross_entropy(logits(inputs, weights), labels) + squares
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    return weights.detach()


if __name__ == "__main__":
    ddpkit.run_main(main)
