"""What a person reads: links lead somewhere, commands and flags exist, pages say what is so."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pages
import pytest
from markdown.extensions.toc import slugify
from pages import ROOT, TASKS, TEMPLATE

import ddpkit

SITE = "https://org.github.io/ddp-template/"
SOURCE = "https://github.com/org/ddp-template/blob/main/"
FLAG = re.compile(r'add(?:_argument)?\(\s*"(--[a-z-]+)"')


def rendered(name: str, task: str) -> str:
    text = (TEMPLATE / name).read_text()
    given = {"task": task, "project_name": "Cracks"}
    return jinja2.Template(text, keep_trailing_newline=True).render(cookiecutter=given)


def documents() -> Iterator[tuple[str, Path, tuple[str, ...], str]]:
    """Yield name, folder, tasks that it is for, and text of each document."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]:
        if path.parent != TEMPLATE and path.name != "CHANGELOG.md":
            yield path.relative_to(ROOT).as_posix(), path.parent, TASKS, path.read_text()
    for name in ("README.md", "EDITS.md", "AGENTS.md"):
        for task in TASKS:
            yield f"{task}/{name}", TEMPLATE, (task,), rendered(name, task)


DOCUMENTS = {name: rest for name, *rest in documents()}


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: of its headings, and of names of ddpkit that it describes."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    found = {slugify(heading.replace("`", ""), "-") for heading in headings}
    return found | set(re.findall(r"^::: (.+)$", text, re.M))


def destination(link: str, folder: Path) -> Path | None:
    """Return the file that a link leads to; None: a page of somebody else's."""
    if link.startswith(SITE):
        page = ROOT / "docs" / link.removeprefix(SITE).rstrip("/")
        return page / "index.md" if page.is_dir() else page.with_name(page.name + ".md")
    if link.startswith(SOURCE):
        return ROOT / link.removeprefix(SOURCE)
    return None if re.match(r"https?:", link) else folder / link


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links(name: str) -> None:
    folder, _, text = DOCUMENTS[name]
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
    for url in re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', prose):
        link, _, anchor = "".join(url).partition("#")
        path = destination(link, folder) if link else None
        assert path is None or path.exists(), f"{name}: {link}"
        if anchor and (path or not link):
            target = path.read_text() if path else text
            assert anchor in anchors(target), f"{name}: {link}#{anchor}"


def flags_of(script: str, task: str) -> set[str]:
    """Return the flags of `main.py`, `predict.py` or `ddpkit COMMAND`."""
    kit, folder = ROOT / "ddpkit", TEMPLATE / "tasks" / task
    files = {
        "main.py": (folder / "flags.py", kit / "run" / "flags.py"),
        "predict.py": (folder / "predict.py",),
        "ddpkit where": (),
    }.get(script) or (kit / "tools" / f"{script.split()[-1]}.py",) * (script != "ddpkit where")
    return {flag for file in files for flag in FLAG.findall(file.read_text())} | {"--help"}


def commands(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield line, script and what follows it of each command for a project's scripts."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            line = line if len(words) < 2 else " ".join(words) + line[line.find(" #") :]
            for i, word in enumerate(words):
                if word in ("./launch.sh", "main.py", "slurm/train.sbatch"):
                    yield line, "main.py", words[i + 1 :]
                elif word == "predict.py":
                    yield line, word, words[i + 1 :]
                elif words[i - 1 : i + 1] == ["-m", "ddpkit"]:
                    yield line, f"ddpkit {words[i + 1]}", words[i + 2 :]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands(name: str) -> None:
    _, tasks, text = DOCUMENTS[name]
    for line, script, words in commands(text):
        meant = [task for task in tasks if f"# {task}" in line] or tasks
        for task in meant:
            known = flags_of(script, task)
            assert known >= {word for word in words if word.startswith("--")}, f"{name}: {line}"
            for word in words:
                file = TEMPLATE / "tasks" / task / word[1:]
                assert not word.startswith("@recipes") or file.exists(), f"{name}: {line}"
    for target in re.findall(r"^ *make (\w+)", text, re.M):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), f"{name}: {target}"


@pytest.mark.parametrize("task", TASKS)
def test_what_to_edit(task: str) -> None:
    """The files of the table exist, and have what it names."""
    table = rendered("README.md", task).split("## What to edit")[1].split("\n\n")[2]
    for file, names in re.findall(r"`(\w+\.py)`((?:, `\w+`)*)", table):
        (path,) = (p for p in (TEMPLATE / file, TEMPLATE / "tasks" / task / file) if p.exists())
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(def|class) {name}\b|^{name}\b.* =", path.read_text(), re.M), name


def test_length() -> None:
    """Of what people read first."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    texts = [(TEMPLATE / "README.md").read_text(), *(rendered("README.md", t) for t in TASKS)]
    assert all(len(text.splitlines()) <= 200 for text in texts)


def test_flags() -> None:
    assert pages.FLAGS.read_text() == pages.flags_page(), f"to update: python {pages.__file__}"


def test_names_of_ddpkit() -> None:
    """The pages describe each name of the door, once, and no other."""
    texts = [path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")]
    named = [name for text in texts for name in re.findall(r"^::: ddpkit\.(\w+)$", text, re.M)]
    assert sorted(named) == sorted(ddpkit.DOOR)
    listed = (ROOT / "docs" / "api" / "index.md").read_text()
    assert sorted(re.findall(r"\[`(\w+)`\]", listed)) == sorted(ddpkit.DOOR)
