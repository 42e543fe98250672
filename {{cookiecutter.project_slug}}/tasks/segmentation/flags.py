"""The flags, one line each. A flag of yours is one more line; checkpoints keep all of them."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import ddpkit

ROOT = Path(__file__).resolve().parent
DEMO = {
    "encoder": "resnet18",
    "image_size": 128,
    "epochs": 2,
    "batch_size": 8,
    "weights": "none",
}  # defaults without --data


# fmt: off
def parse_args(argv: Sequence[str] | None = None, defaults: Mapping[str, object] | None = None) -> Namespace:
    """Return the flags; `defaults`, such as the "args" of a checkpoint, stand for those not given."""
    parser = ddpkit.Parser(description="Train a network for segmentation; README.md explains.", epilog="@FILE reads flags from a file.")
    count = parser.at_least(0)
    positive = parser.at_least(1)
    rate = parser.at_least(0, float)
    share = parser.at_least(0, float, below=1)

    add = parser.add_argument_group("first").add_argument
    add("--data", type=Path, metavar="DIR", help="folder with train/ and val/ (default: the demo set, with its own --epochs and sizes)")
    add("--output-dir", type=Path, default=ROOT / "runs/default", metavar="DIR", help="checkpoints, metrics and plots")
    add("--fold", type=parser.fold, metavar="N/K", help="validate on part N of K of the training set instead of val, train on the others")
    add("--resume", default="auto", metavar="auto|never|PATH", help="auto: continue from last.pt; never: delete the run, start over; or a checkpoint")
    add("--eval-only", nargs="?", const="val", choices=("val", "test"), help="evaluate best.pt, or --resume PATH, and print a table; test: on DIR/test or DIR/test.csv")
    add("--json", action="store_true", help="with --eval-only: print one line of JSON in place of the table")
    add("--arch", default="unet", metavar="NAME", help="decoder of segmentation-models-pytorch, or torchvision's, such as deeplabv3_resnet50")
    add("--encoder", default="resnet34", metavar="NAME", help="backbone that feeds the decoder")
    add("--weights", default="auto", metavar="auto|none|NAME|FILE", help="start from published weights (imagenet, DEFAULT) or a .pt file; auto: if they can be downloaded")
    add("--image-size", type=positive, default=512, metavar="PIXELS", help="side of the training images")
    add("--epochs", type=positive, default=30, help="passes over the training set")
    add("--batch-size", type=positive, default=32, help="images per rank and forward pass")
    add("--accumulate", type=positive, default=1, help="forward passes per optimizer step")
    add("--lr", type=rate, help="peak learning rate (default: 0.1 for sgd, else 0.001)")
    add("--workers", type=count, help="loader processes per rank (default: CPUs / ranks, at most 16)")
    add("--amp", choices=("auto", "off", "bf16", "fp16"), default="auto", help="mixed precision; auto: bf16 or fp16 on GPUs, off on CPUs")
    add("--compile", action="store_true", help="torch.compile: minutes at the start, faster steps afterwards")
    add("--seed", type=count, default=0, help="of initial weights, sample order, augmentation and dropout")

    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", default="adamw", metavar="NAME", help="adamw, sgd, or any other of timm, such as muon")
    add("--weight-decay", type=rate, help="not on biases and norms (default: 0.0001 for sgd, else 0.05)")
    add("--schedule", choices=("cosine", "step", "poly", "wsd"), default="cosine", help="of --lr: cosine decay, / 10 every 30 epochs, polynomial, or linear at the end")
    add("--warmup-epochs", type=rate, default=0.5, metavar="EPOCHS", help="of linear warm-up")
    add("--clip-grad-norm", type=rate, default=0.0, metavar="NORM", help="maximum norm of the gradient; 0: no clipping")
    add("--layer-decay", type=rate, default=1.0, metavar="FACTOR", help="learning rate of the encoder, as a factor of --lr")
    add("--freeze-backbone", type=count, default=0, metavar="EPOCHS", help="train only the other layers for so many epochs")
    add("--ema", type=share, default=0.0, metavar="DECAY", help="evaluate and save an average of the weights, such as 0.999; 0: none")
    add("--patience", type=count, default=0, metavar="EPOCHS", help="end after so many epochs without a new best; 0: never")

    add = parser.add_argument_group("loss and images").add_argument
    add("--label-smoothing", type=share, default=0.0, metavar="SHARE", help="of each label, divided among all classes")
    add("--class-weights", type=parser.class_weights, metavar="auto|A,B,...", help="of the classes in the loss; auto: from their shares of the labels")
    add("--augment", default="", metavar="NAME,...", help="of color, grey, rotation, vflip")
    add("--cutmix", type=rate, default=0.0, metavar="ALPHA", help="paste a box of another image and mask, of a share from Beta(ALPHA, ALPHA)")
    add("--loss", default="ce", metavar="TERMS", help="ce, dice, focal, lovasz, or a sum such as ce+0.5*dice")
    add("--tta", action="store_true", help="evaluate and predict mirrored images, too, and take the mean")
    add("--tile", type=count, default=2048, metavar="PIXELS", help="predict larger images in overlapping tiles of that side; 0: whole")

    add = parser.add_argument_group("machine").add_argument
    add("--tracker", choices=("mlflow", "trackio", "wandb"), help="also log metrics there; offline as each of them is told to")
    add("--log-every", type=count, default=50, metavar="STEPS", help="log loss, rate and speed every STEPS optimizer steps; 0: never")
    add("--save-every", type=count, default=0, metavar="STEPS", help="also save every STEPS optimizer steps; 0: after each epoch")
    add("--sync-bn", action="store_true", help="BatchNorm over the images of all ranks; on GPUs only")
    add("--deterministic", action="store_true", help="the same bits on GPUs; slower")
    args = parser.parse(argv, defaults)
    if args.json and not args.eval_only and not defaults:
        parser.error("--json needs --eval-only")
    if not args.data and not defaults:
        args = parser.parse(argv, DEMO)
    is_sgd = args.optimizer == "sgd"
    if args.lr is None:
        args.lr = 0.1 if is_sgd else 0.001
    if args.weight_decay is None:
        args.weight_decay = 0.0001 if is_sgd else 0.05
    return args
