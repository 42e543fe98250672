"""Calls a function of snippets/ in a project's folder.

    python calling.py MODULE.FUNCTION '[ARGUMENT, ...]' FILE

What it returns goes to the file, as JSON does.
"""

import importlib
import json
import os
import sys
from pathlib import Path


def call(name: str, args: list[object], file: str) -> None:
    module, function = name.split(".")
    value = getattr(importlib.import_module(f"snippets.{module}"), function)(*args)
    Path(file).write_text(json.dumps(value))


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    call(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
