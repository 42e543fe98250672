"""What docs/flags.md quotes: --help of main.py. Run this to write it anew."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
FLAGS = ROOT / "docs" / "flags.md"
TASKS = ("classification", "segmentation")


def help_of(task: str) -> str:
    """Return the groups of flags of a task's `python main.py --help`, with a short --output-dir."""
    paths = map(str, (TEMPLATE / "tasks" / task, ROOT))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"}
    code = "import flags, pathlib; flags.ROOT = pathlib.Path(); flags.parse_args(['--help'])"
    text = subprocess.check_output([sys.executable, "-Bc", code], env=env, text=True)
    return text[text.index("first:\n") : text.index("@FILE")].strip()


def flags_page() -> str:
    """Return docs/flags.md with the flags of now, after the notes that a person writes."""
    notes, _, _ = FLAGS.read_text().partition("## Classification\n")
    parts = (f"## {task.capitalize()}\n\n```text\n{help_of(task)}\n```\n" for task in TASKS)
    return notes + "\n".join(parts)


if __name__ == "__main__":
    FLAGS.write_text(flags_page())
