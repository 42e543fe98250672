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

Reads every file once, and prints what is in them and all that is wrong with them. Draws check.png:
a dozen training images with their classes, or tinted by their masks, and beside each what
dataset.py makes of it, with the flags of main.py that follow DIR, such as --augment rotation.

The exit status is 1 if there are errors: files that cannot be read, images without masks and masks
without images, sizes that differ, values that are no class, images that need another value_range in
data.json, or that are in two of train, val and test, as groups may be, or have two labels; not for
warnings: images that come twice in a part, or that EXIF turns beside their masks.
Whatever else training refuses is told in one line, with status 2.
""",
)
add = CHECK.add_argument
add("data", metavar="DIR", type=Path, help="as --data of main.py")
add("--workers", type=CHECK.at_least(0), default=cpus(), help="processes that read")
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
add("--picture", type=Path, default="check.png", metavar="PATH", help="what to draw")

EXPORT = Parser(
    prog="python -m ddpkit export",
    description="""\
Export a network: python -m ddpkit export --checkpoint best.pt --output DIR

Writes DIR/model.onnx, which returns what `infer` in model.py does.
Input: `images`, uint8 (N, 3, H, W), RGB, normalised inside; with "channels" in data.json float32
(N, channels, H, W), 0 to 1, normalised inside; of another dataset with floats those, as they are.
Output: `logits`, float32. N is free; in segmentation H and W, too: 64 and larger multiples of 32
(pad at the right and below). The file holds, as JSON, classes, colors, arch, size, multiple_of,
channels, value_range, mean and std. It appears if it returns what the network does, of random
images.
""",
)
add = EXPORT.add_argument
add(
    "--checkpoint",
    metavar="FILE",
    default="runs/default/best.pt",
    help="of the network",
)
add("--output", metavar="DIR", type=Path, default="exported", help="for model.onnx")

PUBLISH = Parser(
    prog="python -m ddpkit publish",
    description="""\
Publish a network on the Hugging Face hub: python -m ddpkit publish --repo USER/NAME

Writes README.md, a model card, to --output, with the checkpoint and what lies beside it: args.json,
metrics.csv, per_class.csv and images. Of the paths of this machine, as in flags, only the last name
is written. Pushes them to the model USER/NAME, which is made if it is not there; without --repo
pushes nothing.
""",
)
add = PUBLISH.add_argument
add(
    "--checkpoint",
    metavar="FILE",
    type=Path,
    default="runs/default/best.pt",
    help="of a run",
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
