"""What cookiecutter does with the template folder, for copier: render documents, run the hook."""

import contextlib
import json
import re
import sys
from pathlib import Path

import jinja2

answers = json.loads(sys.argv[1])
Path(".copier-answers.yml").write_text(
    json.dumps(answers, indent=2) + "\n", encoding="utf-8"
)
address = re.sub("^gh:(.*)", r"https://github.com/\1.git", answers["_src_path"])
address = address.removeprefix("git+")
context = {**answers, "_template": address, "_commit": sys.argv[2]}


def rendered(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    template = jinja2.Template(text, keep_trailing_newline=True)
    return template.render(cookiecutter=context)


for document in (Path("README.md"), Path("EDITS.md")):
    document.write_text(rendered(document), encoding="utf-8")
# What to type next is for a new project.
with contextlib.redirect_stdout(sys.stdout if sys.argv[3] == "copy" else None):
    exec(rendered(Path(__file__).with_name("post_gen_project.py")))
