"""Put the chosen task's files and ddpkit in place, drop the others, record the template's version
for `cruft update`, and say what to type next."""

# cookiecutter may run under an older Python than the project
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

# Plain cookiecutter adds the template's address and folder to the answers; cruft does
# not.
CONTEXT = json.loads(r""" {{ cookiecutter | tojson }} """)


def template_version(repository: Path) -> tuple[str, str] | None:
    """Return the template's address and commit, or None if no commit describes it.

    The address is one that git can clone: the folder of a local template, otherwise the URL that
    cookiecutter cloned (abbreviations such as `gh:org/name` expanded), without user or password.
    """

    def git(*args: str) -> str:
        command = ["git", f"--git-dir={repository}/.git", f"--work-tree={repository}"]
        command += args
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        if git("status", "--porcelain"):
            return None  # uncommitted changes
        commit = git("rev-parse", "HEAD")
        if CONTEXT["_repo_dir"] == CONTEXT["_template"]:
            return str(repository), commit
        url = git("config", "remote.origin.url")
        return re.sub("(https?://)[^/]*@", r"\1", url), commit
    # no git, or not a repository (an archive)
    except (OSError, subprocess.CalledProcessError):
        return None


def place_library(repository: Path | None, template: str, commit: str) -> None:
    """Name the library in requirements.txt if it can be had at that address, else copy it.

    What a copy requires is in requirements.txt already.
    """
    library = Path("ddpkit")
    if template.startswith("https://") and commit:
        if library.is_file():  # where links cannot be, as in an archive and on Windows
            library.unlink()
        else:
            shutil.rmtree(library)
        # with what it requires
        line = f"ddpkit[{CONTEXT['task']}] @ git+{template}@{commit}\n"
        Path("requirements.txt").write_text(line, encoding="utf-8")
        return
    if library.is_file() and repository:
        library.unlink()
        shutil.copytree(repository / "ddpkit", library)
    for cache in list(library.rglob("__pycache__")):
        shutil.rmtree(cache)


def write_cruft_file(template: str, commit: str) -> None:
    """Write the .cruft.json that `cruft create` would write, so that `cruft update` works."""
    local = ("_output_dir", "_repo_dir", "_checkout")  # cruft does not record these
    answers = {key: value for key, value in CONTEXT.items() if key not in local}
    state = {
        "template": template,
        "commit": commit,
        "checkout": CONTEXT["_checkout"],
        "context": {
            "cookiecutter": {**answers, "_template": template, "_commit": commit}
        },
        "directory": None,
    }
    text = json.dumps(state, ensure_ascii=False, indent=2)
    Path(".cruft.json").write_text(text + "\n", encoding="utf-8")


tasks = Path("tasks")
chosen = tasks / CONTEXT["task"]
for path in filter(Path.is_file, chosen.rglob("*")):
    place = path.relative_to(chosen)
    place.parent.mkdir(exist_ok=True)
    path.replace(place)
shutil.rmtree(tasks, ignore_errors=True)
Path("launch.sh").chmod(0o755)  # an archive may have lost it
if "_repo_dir" in CONTEXT:
    # cookiecutter passes on a relative path as typed: found unless --output-dir was
    # given, too.
    repository = Path(CONTEXT["_output_dir"], CONTEXT["_repo_dir"]).resolve()
    address, commit = template_version(repository) or ("", "")
    if commit:
        write_cruft_file(address, commit)
    place_library(repository, address, commit)
else:  # cruft runs this hook and writes the file itself
    place_library(None, CONTEXT.get("_template", ""), CONTEXT.get("_commit", ""))

# `cruft update` generates what it compares in temporary folders of its own.
above = Path.cwd().parent
is_temporary = above.parent == Path(tempfile.gettempdir()).resolve()
is_update = is_temporary and above.name.startswith(tempfile.gettempprefix())
# Windows has no bash.
start = "python -m ddpkit launch main.py" if os.name == "nt" else "./launch.sh"
if "_repo_dir" in CONTEXT or not is_update:
    print(
        f"""
Next:
  cd {CONTEXT["project_slug"]}
  python -m pip install -r requirements.txt
  {start}"""
    )
