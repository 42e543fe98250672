"""Check a data set before training: python check_data.py DIR

Reads every image once and prints what is in it, and all that is wrong with it. Writes
runs/check/check.png, images of every class, and, if there are any, check.csv, all findings.

The exit status is 1 if there are errors: images that cannot be read, that need another value_range
in data.json, or that are in train and in val. Images that come twice are warnings, which leave it
at 0. Folders that training refuses are told in one line, with status 2.
"""

from collections.abc import Sequence

import ddpkit

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.prepare()

from ddpkit.check import survey
from ddpkit.data import folders
from ddpkit.data.format import read_format


def main(argv: Sequence[str] | None = None) -> None:
    args = survey.start(argv, __doc__)
    train, val, classes = folders.find_labelled(args.data)
    format = read_format(args.data)
    found = survey.Survey(args.data, (train, val), classes, format, len(classes))
    found.read(args.workers)
    survey.finish(found, args.output, args.write)


if __name__ == "__main__":
    ddpkit.start(main)
