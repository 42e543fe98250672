"""EDITS.md of a project, made from template/edits: page.md and a diff for each edit.

Run this to write it anew, and docs/common-edits.md, which is for both tasks. A line of page.md such
as `<!-- flag.diff -->` stands for what that diff changes, told place by place. To change a diff,
edit a generated project FOLDER, and run this with the diff's place and that folder: both/flag
FOLDER, or classification/parts FOLDER.
"""

import ast
import difflib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
PAGE = TEMPLATE / "EDITS.md"
SITE_PAGE = ROOT / "docs" / "common-edits.md"
SITE = "https://org.github.io/ddp-template/"
EDITS = Path(__file__).resolve().parent / "template" / "edits"
TASKS = ("classification", "segmentation")
WIDTH = 66  # of a line of code that is quoted in a sentence
UNKNOWN = "?"
CLOSING = {"(": ")", "{": "}", "[": "]"}

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
    paths = [path for part in ("both", task) for path in (EDITS / part).glob("*.diff")]
    return {path.stem: path.read_text() for path in sorted(paths)}


def generated(task: str) -> Files:
    return read(TEMPLATE) | read(TEMPLATE / "tasks" / task)


def hunks(diff: str) -> Iterator[Hunk]:
    parts = re.split(r"^--- .*\n\+\+\+ b/(.*)\n", diff, flags=re.M)[1:]
    for file, text in zip(parts[::2], parts[1::2], strict=True):
        places = re.split(r"^@@ -(\d+).*\n", text, flags=re.M)[1:]
        for start, lines in zip(places[::2], places[1::2], strict=True):
            signed = [line or " " for line in lines.splitlines()]
            yield Hunk(file, max(0, int(start) - 1), signed)


def find(hunk: Hunk, lines: list[str]) -> int:
    """Return the line, from 0, that a hunk begins at: of several places the nearest."""
    old = hunk.old
    places = [0] if not old else [i for i, line in enumerate(lines) if line == old[0]]
    places = [i for i in places if lines[i : i + len(old)] == old]
    if not places:
        raise ValueError(f"{hunk.file}:{hunk.start + 1}: not there:\n" + "\n".join(old))
    return min(places, key=lambda i: abs(i - hunk.start))


def apply(diff: str, files: Files) -> Files:
    files = dict(files)
    shifts: dict[str, int] = {}  # of the lines of a file, by the hunks before
    for hunk in hunks(diff):
        lines = files.get(hunk.file, [])
        shift = shifts.get(hunk.file, 0)
        hunk = replace(hunk, start=hunk.start + shift)
        at = find(hunk, lines)
        files[hunk.file] = lines[:at] + hunk.new + lines[at + len(hunk.old) :]
        shifts[hunk.file] = shift + len(hunk.new) - len(hunk.old)
    return files


def make_diff(old: Files, new: Files) -> str:
    """Return a diff with as little context as says where its hunks belong.

    What is only added has the line below as its context, so that two diffs can add at one place.
    """
    parts = []
    for file, lines in sorted(new.items()):
        source = old.get(file)
        if source is None:
            parts.append(f"--- /dev/null\n+++ b/{file}\n@@ -0,0 +1,{len(lines)} @@\n")
            parts.extend(f"+{line}\n" for line in lines)
        elif source != lines:
            parts.append(f"--- a/{file}\n+++ b/{file}\n")
            parts.extend(hunks_of(source, lines))
    return "".join(parts)


def hunks_of(old: list[str], new: list[str]) -> Iterator[str]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    changed: list[tuple[int, int, int, int]] = []
    for kind, i, j, k, m in matcher.get_opcodes():
        is_near = bool(changed) and i - changed[-1][1] <= 1
        if kind != "equal" and is_near and (i < j or changed[-1][0] < changed[-1][1]):
            first, _, third, _ = changed.pop()
            changed.append((first, j, third, m))
        elif kind != "equal":
            changed.append((i, j, k, m))
    shift = 0
    end = len(old)
    while changed:
        first, last = changed[0][:2]
        size = 1
        while not is_place(old[first:last], old) or last == changed[size - 1][1] < end:
            if last < end:
                last += 1
            else:
                first -= 1
            # the next change is in this context
            if changed[size:] and changed[size][0] < last:
                last = max(last, changed[size][1])
                size += 1
        lines = [f" {line}" for line in old[first : changed[0][0]]]
        for n, (i, j, k, m) in enumerate(changed[:size], 1):
            lines += [f"-{line}" for line in old[i:j]]
            lines += [f"+{line}" for line in new[k:m]]
            following = changed[n][0] if n < size else last
            lines += [f" {line}" for line in old[j:following]]
        taken = changed[:size]
        changed = changed[size:]
        more = sum(m - k - (j - i) for i, j, k, m in taken)
        length = last - first
        yield f"@@ -{first + 1},{length} +{first + 1 + shift},{length + more} @@\n"
        yield "".join(line.rstrip() + "\n" for line in lines)
        shift += more


def is_place(some: list[str], lines: list[str]) -> bool:
    """Return whether `some` lines are there once."""
    return sum(lines[i : i + len(some)] == some for i in range(len(lines))) == 1


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
    changed = source[removed.start : removed.stop] + added
    first_line = next(line for line in changed if line.strip())
    indent = indent_of(first_line)
    name, scope = scope_of(tree, source, removed.start, indent)
    where = f"In `{name}` of `{file}`" if name else f"In `{file}`"

    def quoted(i: int) -> str:
        return quote(i, tree, source, scope)

    if removed:
        lines = quoted(removed.start)
        if lines.endswith(UNKNOWN):
            raise ValueError(f"{file}:{removed.start + 1}: this line is not unique")
        if len(removed) > 1:
            lines = f"the {len(removed)} lines from {lines}"
            last = quoted(removed.stop - 1)
            is_word = re.search(r"\w", source[removed.stop - 1])
            if is_word and not last.endswith(UNKNOWN):
                lines = f"{lines} to {last}"
        if not added:
            return f"{where}, delete {lines}."
        return f"{where}, replace {lines} by:\n\n{fenced(added)}"
    above = removed.start - 1
    below = removed.start
    while not source[below].strip():
        below += 1
    while not source[above].strip():
        above -= 1
    if above == end_of_head(tree, name):
        return f"At the start of `{name}` of `{file}`, add:\n\n{fenced(added)}"
    ways = [f"after {quoted(above)}", f"before {quoted(below)}"]
    is_definition = re.match("class |def |@", first_line) and below - above > 1
    if is_definition or indent_of(source[above]) > indent == indent_of(source[below]):
        ways.reverse()
    known = [way for way in ways if not way.endswith(UNKNOWN)]
    if not known:
        raise ValueError(
            f"{file}:{removed.start + 1}: neither the line above nor below is unique"
        )
    return f"{where}, {known[0]}, add:\n\n{fenced(added)}"


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def scope_of(
    tree: ast.Module, source: list[str], at: int, indent: int
) -> tuple[str, range]:
    """Return the name of the innermost function or class that line `at` is in, and its lines.

    indent: that of what comes to this line, as the line may be the one after the end.
    """
    name = ""
    scope = range(len(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = range(node.lineno - 1, node.end_lineno or 0)
            if inside.start < at <= inside.stop and node.col_offset < indent:
                name = f"{name}.{node.name}" if name else node.name
                scope = inside
    return name, scope


def end_of_head(tree: ast.Module, name: str) -> int:
    """Return the last line, from 0, of the docstring of a function; -1: it has none."""
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.FunctionDef)
            or node.name != name.rpartition(".")[2]
        ):
            continue
        if ast.get_docstring(node):
            return (node.body[0].end_lineno or 0) - 1
    return -1


def quote(i: int, tree: ast.Module, source: list[str], scope: range) -> str:
    """Return line i as a sentence names it, or UNKNOWN if its scope has another one like it."""
    is_whole = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or node.end_lineno != i + 1:
            continue
        if not re.search(r"\w", source[i]):  # a closing bracket
            i = node.lineno - 1
            is_whole = True
    line = source[i].strip()
    text = line
    if len(line) > WIDTH:
        text = line[: WIDTH - 4].rpartition(" ")[0].strip(" ,")
    if [n for n in scope if source[n].strip().startswith(text)] != [i]:
        return UNKNOWN
    if is_whole and line[-1] in CLOSING:
        return f"`{text}...{CLOSING[line[-1]]}`"
    return f"`{text} ...`" if text != line else f"`{text}`"


def fenced(lines: list[str]) -> str:
    text = "\n".join(lines).strip("\n")
    return f"```python\n{text}\n```"


def text_of(task: str) -> str:
    """Return the page of a task."""
    notes = jinja2.Template((EDITS / "page.md").read_text(), keep_trailing_newline=True)
    text = notes.render(task=task)
    known = diffs(task)
    files = generated(task)
    text = re.sub(
        r"<!-- (\w+)\.diff -->",
        lambda found: "\n\n".join(places(known[found[1]], files)),
        text,
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


def site_page() -> str:
    """Return EDITS.md for the site: an edit that differs has a tab for each task."""
    text = (EDITS / "page.md").read_text()
    titles = re.findall(r"^(?:{% endif %})?(##+ .*)$", text, re.M)
    both = [sections(text_of(task)) for task in TASKS]
    head = both[0][""].replace(contents(text_of(TASKS[0])) + "\n\n", "")
    parts = [head]
    for title in titles:
        found = [of_task.get(title) for of_task in both]
        parts.append(f"{title}\n\n")
        if found[0] == found[1]:
            parts.append(str(found[0]))
            continue
        for task, section in zip(TASKS, found, strict=True):
            if section is not None:
                tab = f'=== "{task.capitalize()}"\n\n{section}'
                parts.append(tab.replace("\n", "\n    ").rstrip() + "\n\n")
    page = "".join(parts).replace("<!-- fmt:off -->\n\n", "")
    page = re.sub(rf"{SITE}([\w-]+)/", r"\1.md", page)
    return re.sub(r" +$", "", page, flags=re.M).rstrip() + "\n"


def sections(text: str) -> dict[str, str]:
    """Return what is below each heading of a page; what comes first is below ""."""
    first, *rest = re.split(r"^(##+ .*)\n+", text, flags=re.M)
    return {"": first} | dict(zip(rest[::2], rest[1::2], strict=True))


def page() -> str:
    """Return EDITS.md of both tasks: where they differ, a condition of Jinja."""
    one = text_of(TASKS[0]).splitlines(keepends=True)
    other = text_of(TASKS[1]).splitlines(keepends=True)
    assert not re.search("{[{%#]", "".join(one + other)), "Jinja would read it"
    parts = []
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "equal":
            parts.extend(one[i:j])
            continue
        parts.append(
            f'{{% if cookiecutter.task == "{TASKS[0]}" %}}' + "".join(one[i:j])
        )
        parts.append("{% else %}" * (k < m) + "".join(other[k:m]) + "{% endif %}")
    return "".join(parts)


def read(folder: Path) -> Files:
    return {path.name: path.read_text().splitlines() for path in folder.glob("*.py")}


def main(name: str = "", folder: str = "") -> None:
    if name:
        project = Path(folder)
        task = TASKS[(project / "losses.py").exists()]
        ruff = ["-m", "ruff", "format", "--check", "--exclude", "ddpkit", "."]
        subprocess.run([sys.executable, *ruff], cwd=project, check=True)
        (EDITS / f"{name}.diff").write_text(make_diff(generated(task), read(project)))
    PAGE.write_text(page())
    SITE_PAGE.write_text(site_page())


if __name__ == "__main__":
    main(*sys.argv[1:])
