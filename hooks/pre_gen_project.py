"""Check the answers: a folder name that every shell, URL and system takes, no empty text."""

import json
import re
import shlex
import sys

CONTEXT = json.loads(r""" {{ cookiecutter | tojson }} """)
SLUG = CONTEXT["project_slug"]

for question in ("project_name", "author"):
    if not CONTEXT[question].strip():
        sys.exit(
            f"error: {question} must not be empty: use, for example, {question}='My Project'"
        )
if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", SLUG):
    # cookiecutter cannot ask again: the answers are given back as a command
    fitting = re.sub(r"[^A-Za-z0-9._-]+", "_", SLUG).strip("._-") or "my_project"
    words = ["cookiecutter", CONTEXT["_template"], "--no-input"]
    for name in ("project_name", "task", "author", "license", "torch"):
        words.append(f"{name}={CONTEXT[name]}")
    words.append(f"project_slug={fitting}")
    sys.exit(
        f"error: project_slug {SLUG!r}: use letters, digits, '.', '_' and '-', "
        f"and begin with a letter or a digit, such as: {shlex.join(words)}"
    )
