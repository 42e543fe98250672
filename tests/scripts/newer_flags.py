"""A script of the project whose network has newer flags: newer_flags.py SCRIPT FLAG..."""

import runpy
import sys

from snippets import owner

owner.add_flags()
runpy.run_path(sys.argv.pop(1), run_name="__main__")
