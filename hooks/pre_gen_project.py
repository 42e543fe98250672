"""Check the answers: a folder name that every shell, URL and system takes, no empty text."""

import json
import re
import shlex
import sys

CONTEXT = json.loads(r""" {{ cookiecutter | tojson }} """)
SLUG = CONTEXT["project_slug"]

for question in ("project_name", "author"):
    if len(CONTEXT[question].splitlines()) != 1 or not CONTEXT[question].strip():
        sys.exit(
            f"error: {question} must be one line, not empty: use, for example, "
            f"{question}='My Project'"
        )
# Windows has devices of these names, and drops a dot at the end.
DEVICE = r"(con|prn|aux|nul|com\d|lpt\d)(\.|\Z)"
if not re.match(rf"(?i)(?!{DEVICE})[a-z0-9]([a-z0-9._-]*[a-z0-9_-])?\Z", SLUG):
    # cookiecutter cannot ask again: the answers are given back as a command
    fitting = re.sub(r"[^A-Za-z0-9._-]+", "_", SLUG).strip("._-") or "my_project"
    if re.match(f"(?i){DEVICE}", fitting):
        fitting = f"my_{fitting}"
    words = ["cookiecutter", CONTEXT["_template"], "--no-input"]
    for name in ("project_name", "task", "author", "license", "torch"):
        words.append(f"{name}={CONTEXT[name]}")
    words.append(f"project_slug={fitting}")
    sys.exit(
        f"error: project_slug {SLUG!r}: use letters, digits, '.', '_' and '-', begin with a letter "
        "or a digit, do not end with '.', and avoid the names of Windows devices; such as: "
        f"{shlex.join(words)}"
    )
