"""Refuse a folder name that a shell, a URL or an operating system would stumble over."""

import json
import re
import sys

SLUG = json.loads(r""" {{ cookiecutter.project_slug | tojson }} """)

if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", SLUG):
    sys.exit(
        f"error: project_slug {SLUG!r}: use letters, digits, '.', '_' and '-', "
        "and begin with a letter or a digit"
    )
