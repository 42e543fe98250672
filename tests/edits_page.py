"""EDITS.md of a project, made from template/edits: page.md and a diff for each edit.

Run this to write it anew. A line of page.md such as `<!-- flag.diff -->` stands for what that diff
changes, told place by place.
"""

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
PAGE = TEMPLATE / "EDITS.md"
EDITS = Path(__file__).resolve().parent / "template" / "edits"
TASKS = ("classification", "segmentation")
WIDTH = 66  # of a line of code that is quoted in a sentence

Files = dict[str, list[str]]  # the lines of each file of a project


@dataclass
class Hunk:
    file: str
    start: int  # the line, from 0, where `old` is in the project as it was generated
    lines: list[str]  # of the diff, each with its sign

    @property
    def old(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] != "+"]

    @property
    def new(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] != "-"]


def diffs(task: str) -> dict[str, str]:
    """Return the diffs of a task by their names."""
    paths = sorted([*(EDITS / "both").glob("*.diff"), *(EDITS / task).glob("*.diff")])
    return {path.stem: path.read_text() for path in paths}


def generated(task: str) -> Files:
    paths = [*TEMPLATE.glob("*.py"), *(TEMPLATE / "tasks" / task).glob("*.py")]
    return {path.name: path.read_text().splitlines() for path in paths}


def hunks(diff: str) -> Iterator[Hunk]:
    parts = re.split(r"^--- .*\n\+\+\+ b/(.*)\n", diff, flags=re.M)[1:]
    for file, text in zip(parts[::2], parts[1::2], strict=True):
        places = re.split(r"^@@ -(\d+).*\n", text, flags=re.M)[1:]
        for start, lines in zip(places[::2], places[1::2], strict=True):
            yield Hunk(file, max(0, int(start) - 1), [x or " " for x in lines.splitlines()])


def find(hunk: Hunk, lines: list[str]) -> int:
    """Return the line, from 0, that a hunk begins at: of several places the nearest."""
    size = len(hunk.old)
    places = [i for i in range(len(lines) - size + 1) if lines[i : i + size] == hunk.old]
    if not places:
        raise ValueError(f"{hunk.file}:{hunk.start + 1}: not there:\n" + "\n".join(hunk.old))
    return min(places, key=lambda i: abs(i - hunk.start))


def apply(diff: str, files: Files) -> Files:
    files = dict(files)
    for hunk in hunks(diff):
        lines = files.get(hunk.file, [])
        at = find(hunk, lines)
        files[hunk.file] = [*lines[:at], *hunk.new, *lines[at + len(hunk.old) :]]
    return files


def places(diff: str, files: Files) -> Iterator[str]:
    """Yield a paragraph for each place that a diff changes."""
    imports: dict[str, list[str]] = {}
    texts = []
    for hunk in hunks(diff):
        if hunk.file not in files:
            texts.append(f"A new file, `{hunk.file}`:\n\n{fenced(hunk.new)}")
            continue
        source = files[hunk.file]
        at = find(hunk, source)
        for removed, added in changes(hunk, at):
            if not removed and all(map(is_import, added)):
                imports.setdefault(hunk.file, []).extend(added)
            else:
                texts.append(place(hunk.file, source, removed, added))
    for file, lines in imports.items():
        yield f"In `{file}`, import:\n\n{fenced(lines)}"
    yield from texts


def is_import(line: str) -> bool:
    return line.startswith(("import ", "from "))


def changes(hunk: Hunk, at: int) -> Iterator[tuple[range, list[str]]]:
    """Yield the lines that go, by their numbers from 0, and those that come there."""
    for match in re.finditer(r"[+-]+", "".join(line[0] for line in hunk.lines)):
        start = at + sum(line[0] != "+" for line in hunk.lines[: match.start()])
        some = hunk.lines[match.start() : match.end()]
        gone = sum(line[0] == "-" for line in some)
        yield range(start, start + gone), [line[1:] for line in some if line[0] == "+"]


def place(file: str, source: list[str], removed: range, added: list[str]) -> str:
    tree = ast.parse("\n".join(source))
    changed = [*source[removed.start : removed.stop], *added]
    first_line = next(line for line in changed if line.strip())
    indent = len(first_line) - len(first_line.lstrip())
    name, scope = scope_of(tree, source, removed.start, indent)
    where = f"In `{name}` of `{file}`" if name else f"In `{file}`"

    def quoted(i: int) -> str:
        return quote(i, tree, source, scope)

    if removed:
        first, last = removed.start, removed.stop - 1
        what = f"replace {quoted(first)}" if added else f"delete {quoted(first)}"
        if first != last:
            what = what.replace(" ", " the lines from ", 1) + f" to {quoted(last)}"
        return f"{where}, {what}" + (f" by:\n\n{fenced(added)}" if added else ".")
    before, after = removed.start - 1, removed.start
    while not source[after].strip():
        after += 1
    while not source[before].strip():
        before -= 1
    if re.match("class |def |@", first_line) and after - before > 1:
        return f"{where}, above {quoted(after)}, add:\n\n{fenced(added)}"
    if before == end_of_head(tree, name):
        return f"At the start of `{name}` of `{file}`, add:\n\n{fenced(added)}"
    return f"{where}, after {quoted(before)}, add:\n\n{fenced(added)}"


def scope_of(tree: ast.Module, source: list[str], at: int, indent: int) -> tuple[str, range]:
    """Return the name of the innermost function or class that line `at` is in, and its lines.

    indent: that of what comes to this line, as the line may be the one after the end.
    """
    name, scope = "", range(len(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = range(node.lineno - 1, node.end_lineno or 0)
            if inside.start < at <= inside.stop and node.col_offset < indent:
                name, scope = f"{name}.{node.name}" if name else node.name, inside
    return name, scope


def end_of_head(tree: ast.Module, name: str) -> int:
    """Return the last line, from 0, of the docstring of a function; -1: it has none."""
    for node in ast.walk(tree):
        is_it = isinstance(node, ast.FunctionDef) and node.name == name.rpartition(".")[2]
        if is_it and ast.get_docstring(node):
            return (node.body[0].end_lineno or 0) - 1
    return -1


def quote(i: int, tree: ast.Module, source: list[str], scope: range) -> str:
    """Return line i as a sentence names it, such that nothing else in its scope is named so."""
    for node in ast.walk(tree):
        is_end = isinstance(node, ast.stmt) and node.end_lineno == i + 1
        if is_end and not re.search(r"\w", source[i]):  # a closing bracket
            i = node.lineno - 1
    line = source[i].strip()
    text = line
    if len(line) > WIDTH:
        text = re.match(rf".{{20,{WIDTH}}}[ ,(]", line)[0].strip(" ,")
    same = [n for n in scope if source[n].strip().startswith(text)]
    if same != [i]:
        raise ValueError(f"`{text}` is in lines {[n + 1 for n in same]}: give another place")
    return f"`{text}{' ...' * (text != line)}`"


def fenced(lines: list[str]) -> str:
    text = "\n".join(lines).strip("\n")
    return f"```python\n{text}\n```"


def text_of(task: str) -> str:
    """Return the page of a task."""
    notes = jinja2.Template((EDITS / "page.md").read_text(), keep_trailing_newline=True)
    text = notes.render(task=task)
    known, files = diffs(task), generated(task)
    text = re.sub(
        r"<!-- (\w+)\.diff -->", lambda found: "\n\n".join(places(known[found[1]], files)), text
    )
    return text.replace("<!-- contents -->", contents(text))


def contents(text: str) -> str:
    """Return a line for each `## ` heading of the page, with links to what is below it."""
    lines = []
    for group in re.split(r"^## ", text, flags=re.M)[1:]:
        titles = re.findall(r"^### (.*)$", group, re.M)
        links = [f"[{title}](#{slug(title)})" for title in titles]
        lines.append(f"- {group.splitlines()[0]}: {', '.join(links)}")
    return "\n".join(lines)


def slug(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def page() -> str:
    """Return EDITS.md of both tasks: where they differ, a condition of Jinja."""
    one, other = (text_of(task).splitlines(keepends=True) for task in TASKS)
    assert not re.search("{[{%#]", "".join(one + other)), "Jinja would read it"
    parts = []
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "equal":
            parts.extend(one[i:j])
            continue
        parts.append(f'{{% if cookiecutter.task == "{TASKS[0]}" %}}' + "".join(one[i:j]))
        parts.append("{% else %}" * (k < m) + "".join(other[k:m]) + "{% endif %}")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
