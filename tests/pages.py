"""What people read, and the --help that docs/flags.md quotes. Run this to write it anew."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
FLAGS = ROOT / "docs" / "flags.md"
TASKS = ("classification", "segmentation")


def rendered(name: str, task: str) -> str:
    template = jinja2.Template((TEMPLATE / name).read_text())
    return template.render(cookiecutter={"task": task, "project_name": "Cracks"})


def documents() -> Iterator[tuple[str, Path, tuple[str, ...], str]]:
    """Yield name, folder, tasks that it is for, and text of each document."""
    for pattern in ("*.md", "docs/**/*.md", "[!.]*/README.md"):
        for path in ROOT.glob(pattern):
            if path.parent != TEMPLATE and path.name != "CHANGELOG.md":
                name = path.relative_to(ROOT).as_posix()
                yield name, path.parent, TASKS, path.read_text()
    for name in ("README.md", "EDITS.md", "AGENTS.md"):
        for task in TASKS:
            yield f"{task}/{name}", TEMPLATE, (task,), rendered(name, task)


def help_of(task: str) -> str:
    """Return the groups of flags of a task's `python main.py --help`, with a short --output-dir."""
    paths = map(str, (TEMPLATE / "tasks" / task, ROOT))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"}
    code = "import flags, pathlib; flags.ROOT = pathlib.Path(); flags.parse_args(['--help'])"
    text = subprocess.check_output([sys.executable, "-Bc", code], env=env, text=True)
    return text[text.index("data, model and run:\n") : text.rindex("@FILE")].strip()


def flags_page() -> str:
    """Return docs/flags.md with the flags of now, after the notes that a person writes."""
    notes = FLAGS.read_text().partition("## Classification\n")[0]
    parts = (
        f"## {task.capitalize()}\n\n```text\n{help_of(task)}\n```\n" for task in TASKS
    )
    return notes + "\n".join(parts)


if __name__ == "__main__":
    FLAGS.write_text(flags_page())
