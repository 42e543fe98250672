"""The flags, one line each. A flag of yours is one more line; checkpoints keep all of them."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import ddpkit

ROOT = Path(__file__).resolve().parent
DEMO = {
    "encoder": "resnet18",
    "image_size": 128,
    "epochs": 2,
    "weights": "none",
}  # defaults without --data


# fmt: off
def parse_args(argv: Sequence[str] | None = None, defaults: Mapping[str, object] | None = None) -> argparse.Namespace:
    """Return the flags; `defaults`, such as the "args" of a checkpoint, stand for those not given."""
    parser = argparse.ArgumentParser(prog="main.py", usage="%(prog)s [FLAGS] [@FILE]", description="Train a model for segmentation; see README.md.", epilog="@FILE reads flags from a file.")
    # Types, beside int, float, str and Path: what is out of bounds is refused.
    types = ddpkit.Parser
    count = types.at_least(0)
    positive = types.at_least(1)
    rate = types.at_least(0, float)
    fraction = types.at_least(0, float, below=1)

    group = parser.add_argument_group("data, model and run")
    group.add_argument("--data", type=Path, metavar="DIR", help="folder with train/ and val/ (default: the demo set, with its own --epochs and sizes)")
    group.add_argument("--output-dir", type=Path, default=ROOT / "runs/default", metavar="DIR", help="checkpoints, metrics and plots")
    group.add_argument("--fold", type=types.fold, metavar="N/K", help="validate on fold N of K of the training set instead of val, train on the rest")
    group.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="auto: continue from last.pt; never: delete the run, start over; or a checkpoint")
    group.add_argument("--eval-only", nargs="?", const="val", choices=("val", "test"), help="evaluate best.pt, or --resume PATH, and print a table; test: on DIR/test or DIR/test.csv")
    group.add_argument("--json", action="store_true", help="with --eval-only: print one line of JSON in place of the table")
    group.add_argument("--arch", default="unet", metavar="NAME", help="segmentation-models-pytorch decoder, or a torchvision model such as deeplabv3_resnet50")
    group.add_argument("--encoder", default="resnet34", metavar="NAME", help="backbone that feeds the decoder")
    group.add_argument("--weights", default="auto", metavar="auto|none|NAME|FILE", help="start from pretrained weights (imagenet, DEFAULT) or a file; auto: if they can be downloaded")
    group.add_argument("--image-size", type=positive, default=512, metavar="PIXELS", help="side of the training images")
    group.add_argument("--epochs", type=positive, default=30, help="passes over the training set")
    group.add_argument("--batch-size", type=positive, default=8, help="images per rank and forward pass; with half the GPUs, double it or --accumulate")
    group.add_argument("--accumulate", type=positive, default=1, help="forward passes per optimizer step")
    group.add_argument("--virtual-ranks", type=count, default=0, metavar="N", help="train bit-for-bit as on N ranks, on any number of ranks; 0: off")
    group.add_argument("--lr", type=rate, help="peak learning rate (default: 0.1 for sgd, else 0.001); if the global batch is k times larger: x k for sgd, x sqrt(k) for others")
    group.add_argument("--workers", type=count, help="loader processes per rank (default: CPUs / ranks, at most 16)")
    group.add_argument("--amp", choices=("auto", "off", "bf16", "fp16"), default="auto", help="mixed precision; auto: bf16 or fp16 on GPUs, off on CPUs")
    group.add_argument("--compile", action="store_true", help="torch.compile: minutes at the start, then faster steps")
    group.add_argument("--seed", type=count, default=0, help="seed of initial weights, sample order, augmentation and dropout")

    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", default="adamw", metavar="NAME", help="adamw, sgd, or any timm optimizer, such as muon")
    group.add_argument("--weight-decay", type=rate, help="weight decay, except on biases and norms (default: 0.0001 for sgd, else 0.05)")
    group.add_argument("--schedule", choices=("cosine", "step", "poly", "wsd"), default="cosine", help="learning-rate schedule: cosine, x 0.1 every 30 epochs, polynomial, or linear decay at the end")
    group.add_argument("--warmup-epochs", type=rate, default=0.5, metavar="EPOCHS", help="linear warm-up")
    group.add_argument("--clip-grad-norm", type=rate, default=0.0, metavar="NORM", help="maximum norm of the gradient; 0: no clipping")
    group.add_argument("--layer-decay", type=rate, default=1.0, metavar="FACTOR", help="learning rate of the encoder, relative to --lr")
    group.add_argument("--freeze-backbone", type=count, default=0, metavar="EPOCHS", help="train only the other layers for the first EPOCHS epochs")
    group.add_argument("--ema", type=fraction, default=0.0, metavar="DECAY", help="evaluate and save a moving average of the weights, such as 0.999; 0: off")
    group.add_argument("--patience", type=count, default=0, metavar="EPOCHS", help="early stopping after EPOCHS epochs without a new best; 0: never")

    group = parser.add_argument_group("loss and images")
    group.add_argument("--label-smoothing", type=fraction, default=0.0, metavar="FRACTION", help="fraction of each label to spread over all classes")
    group.add_argument("--class-weights", type=types.class_weights, metavar="auto|A,B,...", help="class weights in the loss; auto: from the class frequencies")
    group.add_argument("--hflip", type=fraction, default=0.5, metavar="FRACTION", help="fraction of training images to mirror; 0 if left and right matter, as in digits and text")
    group.add_argument("--augment", default="", metavar="NAME,...", help="any of color, grey, rotation, vflip")
    group.add_argument("--cutmix", type=rate, default=0.0, metavar="ALPHA", help="paste a box of another image and mask, its area drawn from Beta(ALPHA, ALPHA)")
    group.add_argument("--loss", default="ce", metavar="TERMS", help="ce, dice, focal, lovasz, or a sum such as ce+0.5*dice")
    group.add_argument("--tta", action="store_true", help="test-time augmentation: also predict the mirrored image and average; not with --hflip 0")
    group.add_argument("--tile", type=count, default=2048, metavar="PIXELS", help="predict larger images in overlapping tiles of PIXELS; 0: whole images")

    group = parser.add_argument_group("machine")
    group.add_argument("--tracker", choices=("mlflow", "trackio", "wandb"), help="also log metrics there; for offline use, see its own settings")
    group.add_argument("--log-every", type=count, default=50, metavar="STEPS", help="log loss, learning rate and speed every STEPS optimizer steps; 0: never")
    group.add_argument("--save-every", type=count, default=0, metavar="STEPS", help="also save every STEPS optimizer steps; 0: after each epoch")
    group.add_argument("--deterministic", action="store_true", help="bit-for-bit identical runs on GPUs, too; slower")

    group = parser.add_argument_group("ranks")
    group.add_argument("--local-rank", "--local_rank", type=count, default=os.environ.get("LOCAL_RANK", "0"), metavar="NUMBER", help="index of this process and its GPU on its node; set by the launcher")
    group.add_argument("--dist-timeout", type=positive, default=600, metavar="SECONDS", help="how long a rank waits for the others; a week while debugging")
    group.add_argument("--debug", "--debug-rank", nargs="?", type=types.ranks, const="all", metavar="R[,R...][:PORT]", help="ranks that wait for a debugger (default: all), on port 5678 + the first of them")

    # The same flags, read by ddpkit: @FILE, ~, and a mistake in one line with the nearest name.
    parser = ddpkit.Parser(parser)
    parser.set_defaults(**defaults or {})
    args = parser.parse_args(argv)
    if not defaults:
        if args.json and not args.eval_only:
            parser.error("--json needs --eval-only")
        if not args.data:
            # parsed again, so that flags that are given still count
            parser.set_defaults(**DEMO)
            args = parser.parse_args(argv)
    is_sgd = args.optimizer == "sgd"
    if args.lr is None:
        args.lr = 0.1 if is_sgd else 0.001
    if args.weight_decay is None:
        args.weight_decay = 0.0001 if is_sgd else 0.05
    return args
