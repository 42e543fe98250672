"""Check a data set before training: python check_data.py DIR

Reads every image once and prints what is in it, and all that is wrong with it. Writes
runs/check/check.png, images of every class, and check.csv, all findings.

The exit status is 1 if there are errors: images that cannot be read, that are in train and in val,
or in two classes. Warnings alone (an image twice in a class, rare classes) leave it at 0. Folders
that training refuses are told in one line, with status 2.
"""

from collections.abc import Sequence

import engine

if __name__ == "__main__":  # before torch, whose import takes seconds
    engine.prepare()

from engine.check import report
from engine.check.survey import Survey
from engine.data import folders


def main(argv: Sequence[str] | None = None) -> None:
    args = report.start(argv, __doc__)
    train, val, classes = folders.find_labelled(args.data)
    format = report.find_format(args.data, train[0][0])
    survey = Survey(args.data, (train, val), classes, format, len(classes))
    survey.read(args.workers)
    report.finish(survey, args.output, args.write)


if __name__ == "__main__":
    engine.start(main)
