"""The flags of check, export and publish; without torch, for mistakes to show soon."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ddpkit.ranks import process
from ddpkit.ranks.cpus import cpus
from ddpkit.run.flags import Parser

CHECK = Parser(
    prog="python -m ddpkit check",
    description="""\
Check a dataset before training: python -m ddpkit check DIR [main.py's flags]

Reads every file once, and prints what they contain and everything that is
wrong with them. Draws check.png: a dozen training images with their classes,
or tinted by their masks, each next to its augmentation by dataset.py, with the
flags of main.py that follow DIR, such as --augment rotation.

The exit status is 1 if there are errors: unreadable files, images without masks
or masks without images, different sizes, values that are not a class, images
that need another value_range in data.json, and images or groups that are in
several of train, val and test or have two labels. Warnings do not count:
duplicates within a split, and images that EXIF rotates but not their masks. Any
other error that would stop training is one line, with status 2.
""",
)
add = CHECK.add_argument
add("data", metavar="DIR", type=Path, help="the --data of main.py")
add("--workers", type=CHECK.at_least(0), default=cpus(), help="loader processes")
add(
    "--write",
    action="store_true",
    help="write the values proposed in the report to DIR/data.json",
)
add(
    "--skip-broken",
    action="store_true",
    help="if images are broken, write lists without them: DIR/train.csv and others",
)
add("--picture", type=Path, default="check.png", metavar="PATH", help="image to draw")

EXPORT = Parser(
    prog="python -m ddpkit export",
    description="""\
Export a model: python -m ddpkit export --checkpoint best.pt --output DIR

Writes DIR/model.onnx, which returns what `infer` in model.py does.
Input: `images`, uint8 (N, 3, H, W), RGB, normalised inside; with "channels" in
data.json float32 (N, channels, H, W), 0 to 1, normalised inside; if your own
dataset returns floats, those unchanged.
Output: `logits`, float32.
N is free; in segmentation H and W, too: multiples of 32 from 64 up (pad at the
right and bottom). The file contains, as JSON, classes, colors, arch, size,
multiple_of, channels, value_range, mean and std. It is written only if its
logits match the model's on random images.
""",
)
add = EXPORT.add_argument
add(
    "--checkpoint",
    metavar="FILE",
    default="runs/default/best.pt",
    help="checkpoint to export",
)
add(
    "--output",
    metavar="DIR",
    type=Path,
    default="exported",
    help="folder for model.onnx",
)

PUBLISH = Parser(
    prog="python -m ddpkit publish",
    description="""\
Publish to the Hugging Face hub: python -m ddpkit publish --repo USER/NAME

Writes a model card (README.md) to --output, with the checkpoint and the files
next to it: args.json, metrics.csv, per_class.csv and images. Local paths, as in
flags, are reduced to their last name. Pushes all this to the model USER/NAME,
which is created if needed; without --repo it pushes nothing.
""",
)
add = PUBLISH.add_argument
add(
    "--checkpoint",
    metavar="FILE",
    type=Path,
    default="runs/default/best.pt",
    help="checkpoint of a run",
)
add("--output", metavar="DIR", type=Path, default="published", help="folder to write")
add("--repo", metavar="USER/NAME", help="model on the hub to push to")
add("--private", action="store_true", help="if the model is created, make it private")
add("--license", metavar="NAME", default="unknown", help="such as mit or apache-2.0")


def parse_check(
    argv: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Return the flags of `check`, and those of main.py with which DIR is read."""
    given, flags = CHECK.parse_known_args(argv)
    # a mistake in them shows before all files are read
    return given, process.own("flags").parse_args(["--data", str(given.data), *flags])
