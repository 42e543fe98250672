"""Put the chosen task's files, the licence and ddpkit in place, drop the others, write the answers
into pyproject.toml, record the template's version for `cruft update`, and say what to type next.
"""

# cookiecutter may run under an older Python than the project
from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Plain cookiecutter adds the template's address and folder to the answers; cruft does
# not.
CONTEXT = json.loads(r""" {{ cookiecutter | tojson }} """)

# Once ddpkit is in the package index: the releases that a project takes, such as ">=3,<4".
RELEASES = ""
BELOW_DDPKIT = (
    "  # ddpkit pulls in the rest; torch is listed so that [tool.uv.sources] applies"
)
# as in pyproject.toml, for pip
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# What tools leave in a template folder that somebody works in: cookiecutter copies every file.
CACHES = {
    *("__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache"),
    *(".ruff_cache", ".DS_Store", ".idea"),
}


def template_folder() -> Path | None:
    """Return the template's folder, or None if it is not certain.

    cookiecutter passes on a relative path as typed. It is relative to PWD, unless a program has
    changed the folder (or on Windows), and to the output folder, unless --output-dir is given.
    """
    bases = (CONTEXT["_output_dir"], os.environ.get("PWD", ""))
    places = {Path(base, CONTEXT["_repo_dir"]).resolve() for base in bases if base}
    found = [place for place in places if (place / "cookiecutter.json").is_file()]
    return found[0] if len(found) == 1 else None


def git(repository: Path, *args: str) -> str:
    command = ["git", f"--git-dir={repository}/.git", f"--work-tree={repository}"]
    done = subprocess.run([*command, *args], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def check_checkout(repository: Path | None) -> None:
    """Fail if the template is not what --checkout names, which cookiecutter ignores for folders."""
    checkout = CONTEXT["_checkout"]
    if not checkout:
        return
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        head = repository and git(repository, "rev-parse", "HEAD")
        if head and git(repository, "rev-parse", checkout + "^{commit}") == head:
            return
    sys.exit(
        f"error: --checkout {checkout}: cookiecutter ignores it for a folder or an archive, and "
        f"{CONTEXT['_template']} is not at {checkout}: use `git checkout {checkout}` there "
        "first, or generate from its https:// address"
    )


def template_version(repository: Path | None) -> tuple[str, str, str]:
    """Return the template's address and commit or, if no commit describes it, why.

    The address is one that git can clone: the folder of a local template, otherwise the URL that
    cookiecutter cloned (abbreviations such as `gh:org/name` expanded), without user or password.
    """
    if repository is None:
        return "", "", "its relative path could not be resolved: use its absolute path"
    if not (repository / ".git").exists():
        return "", "", "it is not a git repository: generate from its https:// address"
    try:
        changed = git(repository, "status", "--porcelain").splitlines()
        if changed:
            name = changed[0].split(maxsplit=1)[1]
            why = f"it has uncommitted changes ({name}): commit them, then try again"
            return "", "", why
        commit = git(repository, "rev-parse", "HEAD")
        # An abbreviation of the user's may be that of a folder.
        is_local = CONTEXT["_repo_dir"] == CONTEXT["_template"] or not git(
            repository, "for-each-ref", "--contains=HEAD", "refs/remotes", "refs/tags"
        )
        if is_local:
            return str(repository), commit, ""
        url = git(repository, "config", "remote.origin.url")
        return re.sub("(https?://)[^/]*@", r"\1", url), commit, ""
    except OSError:
        return "", "", "git was not found: install it, then try again"
    except subprocess.CalledProcessError as error:
        line = error.stderr.strip().partition("\n")[0]
        return "", "", f"git cannot read it: {line}"


def remove_caches(template: Path) -> None:
    """Remove what tools left in the template folder; what is in the project alone stays."""
    # files before the folders that they are in
    for path in sorted(template.rglob("*"), reverse=True):
        place = path.relative_to(template)
        if CACHES.isdisjoint(place.parts):
            continue
        with contextlib.suppress(OSError):  # a folder with files of the project's own
            place.rmdir() if path.is_dir() else place.unlink()


def place_library(repository: Path | None, template: str, commit: str) -> list[str]:
    """Return what the project requires: ddpkit if it can be had at that address, else what a copy
    of it requires. The copy stays in the project then.
    """
    library = Path("ddpkit")
    required = read("requirements.txt").partition("#")[0].split()
    if template.startswith("https://") and commit:
        remove(library)
        address = RELEASES or f" @ git+{template}@{commit}"
        # It requires all the others. uv takes torch from an index by choice only if the
        # project itself requires it.
        own = [line for line in required if re.match("torch(vision)?>", line)]
        # What `uv add` adds comes last, as they are not sorted.
        return [f"ddpkit[{CONTEXT['task']}]{address}", *sorted(own, reverse=True)]
    if not (library / "__init__.py").is_file():
        # a file, an empty folder or nothing: what archives, and Windows, make of a link
        source = repository and repository / "ddpkit"
        if not source or not (source / "__init__.py").is_file():
            sys.exit(
                f"error: ddpkit cannot be copied from {CONTEXT['_template']}: generate from an "
                "https:// address, or with cookiecutter from the template's absolute path"
            )
        remove(library)
        shutil.copytree(source, library)
    for cache in [path for path in library.rglob("*") if path.name in CACHES]:
        # one within another has gone with that
        shutil.rmtree(cache) if cache.is_dir() else cache.unlink(missing_ok=True)
    return required


def read(name: str) -> str:
    return Path(name).read_text(encoding="utf-8")


def replace(name: str, changes: dict[str, str]) -> None:
    """Replace texts of a file of the project."""
    text = read(name)
    for old, new in changes.items():
        text = text.replace(old, new)
    Path(name).write_bytes(text.encode())


def write_requirements(lines: list[str]) -> None:
    """Write the answers and what the project requires into pyproject.toml, and for pip, too."""
    name = re.sub("[^A-Za-z0-9]+", "-", CONTEXT["project_slug"]).strip("-").lower()
    # A project that has the name of a package which it requires would require itself.
    if name in ("ddpkit", *re.findall(r"(?m)^[\w-]+", read("requirements.txt"))):
        name += "-project"
    title = quoted(CONTEXT["project_name"])
    listed = "".join(f"\n  {quoted(line)}," for line in lines)
    # Each update changes the line of ddpkit: three lines later nothing conflicts with it.
    listed = re.sub(r'(\n  "ddpkit.*)', rf"\1\n{BELOW_DDPKIT}", listed)
    changes = {
        'name = "my-ddp-project"': f"name = {quoted(name)}",
        'description = "My DDP Project"': f"description = {title}",
        'name = "My DDP Project authors"': f"name = {quoted(CONTEXT['author'])}",
        "dependencies = []": f"dependencies = [{listed}\n]",
    }
    licence = f"license = {quoted(CONTEXT['license'])}\n"
    changes['license = "MIT"\n'] = "" if CONTEXT["license"] == "none" else licence
    if CONTEXT["torch"] == "cpu":
        for package in "torch", "torchvision":  # whose lines name pytorch-cpu
            changes[f"# {package} ="] = f"{package} ="
        lines = [f"--extra-index-url {CPU_INDEX}", *lines]
    replace("pyproject.toml", changes)
    before = read("requirements.txt").partition("#")[0]
    replace("requirements.txt", {before: "\n".join([*lines, ""])})


def quoted(text: str) -> str:
    """As a string of TOML."""
    return json.dumps(text, ensure_ascii=False)


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the project has files of its own in it
        folder.rmdir()


def place_license() -> None:
    licenses = Path("licenses")
    if CONTEXT["license"] != "none":
        (licenses / CONTEXT["license"]).replace("LICENSE")
        holder = f"{datetime.date.today().year} {CONTEXT['author']}"
        apache = "[yyyy] [name of copyright owner]"
        replace("LICENSE", {"(c) AUTHOR": f"(c) {holder}", apache: holder})
    for name in "MIT", "Apache-2.0":
        remove(licenses / name)
    remove_if_empty(licenses)


def follow(template: str) -> None:
    """Link to the site and the source of the repository that the project was generated from."""
    address = r"(?:github\.com[/:]|^gh:)([\w.-]+)/([\w.-]+?)(?:\.git)?(?:/|$)"
    found = re.search(address, template)
    if found:
        account, name = found.groups()
        site = {"org.github.io/ddp-template": f"{account}.github.io/{name}"}
        source = {"github.com/org/ddp-template": f"github.com/{account}/{name}"}
        for document in ("AGENTS.md", "EDITS.md", "README.md"):
            replace(document, site | source)


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


repository, address, commit, why_not = None, "", "", ""
if "_repo_dir" in CONTEXT:
    repository = template_folder()
    check_checkout(repository)
    address, commit, why_not = template_version(repository)
    if repository:
        remove_caches(next(repository.glob("*cookiecutter.project_slug*")))
else:  # cruft, which writes .cruft.json itself, or copier
    address = CONTEXT.get("_template", "")
    commit = CONTEXT.get("_commit", "")

tasks = Path("tasks")
chosen = tasks / CONTEXT["task"]
for path in filter(Path.is_file, chosen.rglob("*")):
    place = path.relative_to(chosen)
    place.parent.mkdir(exist_ok=True)
    path.replace(place)
for task in "classification", "segmentation":
    remove(tasks / task)
remove_if_empty(tasks)
Path("launch.sh").chmod(0o755)  # an archive may have lost it
place_license()
if "_repo_dir" in CONTEXT and commit:
    write_cruft_file(address, commit)
write_requirements(place_library(repository, address, commit))
follow(address or CONTEXT["_template"])

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
  cd {Path.cwd().name}
  uv sync
  uv run {start}
or, without uv, in a virtual environment:
  python -m pip install -r requirements.txt
  {start}"""
    )
    if why_not:
        print(
            "\nNo .cruft.json was written, so `cruft update` cannot work. The template:\n"
            f"{why_not}."
        )
