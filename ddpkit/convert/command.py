"""Convert labels of other programs: python -m ddpkit convert SOURCE OUT

Makes OUT, a folder that --data takes: images (hard links, where the disk has
them), masks as PNG or class folders, classes.txt, and the splits train, val and
test as SOURCE has them. The format of SOURCE is detected and printed; --format
overrides it:

{formats}

Where objects overlap, smaller ones are drawn on top. A pixel belongs to an
outline if its centre lies inside; what no object covers is class 0, background.
COCO's crowds, and classes named void, ignore, ignored, unlabeled or unlabelled,
are void (255). What is left out is counted and named. Images are matched by the
path in the label file, never across splits or folders. OUT appears once it is
complete. If it exists already, nothing is written: remove it to convert anew.
"""

import glob
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpkit.convert import formats, result
from ddpkit.convert.labels import LabelledSet
from ddpkit.convert.tree import Tree
from ddpkit.errors import LineError, UserError, clip, escape, print_line, shorten
from ddpkit.run.flags import Parser


def main(argv: Sequence[str] | None = None) -> None:
    width = max(map(len, formats.FORMATS))
    listed = [
        f"  {format.name:{width}}  {format.what}" for format in formats.FORMATS.values()
    ]
    text = (__doc__ or "").format(formats="\n".join(listed))
    parser = Parser(prog="python -m ddpkit convert", description=text)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        type=Path,
        help="folder of images and labels, or its file with the labels",
    )
    add("out", metavar="OUT", type=Path, help="folder to make")
    add("--format", metavar="NAME", choices=formats.FORMATS, help="one of those above")
    add(
        "--follow-links",
        action="store_true",
        help="also take what links in SOURCE lead to outside of it",
    )
    given = parser.parse_args(argv)
    source = given.source
    out = given.out
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: already exists; delete it, or choose another folder")
    for path in sorted(out.parent.glob(f"{glob.escape(out.name)}.partial-*")):
        say(
            f"{path}: is left of a convert that was ended; if none is running, remove it"
        )
    tree = Tree(source, given.follow_links)
    if tree.root.resolve() in out.resolve().parents:
        raise UserError(f"{out}: lies in {tree.root}; choose a folder outside it")
    if tree.beyond:
        say(
            f"skipped: {len(tree.beyond)} links that lead out of {tree.root}, which --follow-links "
            f"takes: {shorten(tree.beyond)}"
        )
    labelled = LabelledSet([])
    name = "any format"
    try:
        format = formats.FORMATS.get(given.format) or formats.find_label_format(tree)
        name = format.name
        say(f"{source}: {name} ({format.what})")
        labelled = formats.read_labels(format, tree)
        lines = result.write_set(labelled, out)
    except LineError:
        raise
    # such as of a key that is missing, or of a size that no memory has
    except Exception as error:
        raise UserError(
            f"{source}: cannot be read as {name} ({clip(repr(error), 200)}); export it again"
        ) from error
    finally:
        for line in labelled.skipped.remarks(tree.root):
            say(line)
    for line in (*labelled.notes, *lines):
        say(line)
    say(f"next: python -m ddpkit check {out}")


def say(line: str) -> None:
    print_line(escape(line), sys.stdout)
