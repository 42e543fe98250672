"""The page on error messages, docs/errors.md, and the list of all of them, messages.md. Run this
to write both anew.

The page explains those that people meet most; it is written by hand in errors.md beside this file,
by the code of each. The list is from the source: a message is reviewed where it changes there.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
PAGE = ROOT / "docs" / "errors.md"
EXPLAINED = Path(__file__).with_suffix(".md")
ERRORS = {"UserError", "NoLabelsError", "DiskError", "Damaged", "Foreign"}
HEAD = """# Errors

For anyone who got a one-line error: cause and remedy of the most common ones.

A mistake ends all ranks with status 2 and one line that names the file or flag, the value and
the remedy. It ends with a code in brackets, such as `[folders.open]`: the file and function that
found it. Search this page for the code. If it is not here, the message says all there is;
[report](https://github.com/org/ddp-template/issues) one that does not help.

"""
MESSAGES = ROOT / "tests" / "messages.md"
TABLE = """# All error messages

Written by `make pages`. What is in braces is filled in.

| Code | Message |
| --- | --- |
"""


def texts(
    node: ast.AST, scope: ast.AST, within: frozenset[str] = frozenset()
) -> list[str]:
    """Return what an expression may say; {name} is what it fills in.

    within: names whose values are being looked up, which may refer to themselves.
    """
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.IfExp):
        return texts(node.body, scope, within) + texts(node.orelse, scope, within)
    if isinstance(node, ast.JoinedStr):
        found = [""]
        for part in node.values:
            value = part.value if isinstance(part, ast.FormattedValue) else part
            more = texts(value, scope, within)
            found = [text + each for text in found for each in more]
        return found
    if isinstance(node, ast.Name) and node.id not in within:
        for each in ast.walk(scope):  # a text that the function puts together before
            if (
                not isinstance(each, ast.Assign)
                or ast.unparse(each.targets[0]) != node.id
            ):
                continue
            if isinstance(each.value, ast.JoinedStr | ast.IfExp | ast.Constant):
                values = texts(each.value, scope, within | {node.id})
                if any(" " in value for value in values):
                    return values
    if isinstance(node, ast.Name):
        return [f"{{{node.id.strip('_')}}}"]
    if isinstance(node, ast.Attribute):
        return [f"{{{node.attr.strip('_')}}}"]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        key = node.slice.value
        return [f"{{{key}}}" if isinstance(key, str) else "{first}"]
    names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    return [f"{{{names[-1] if names else '...'}}}"]


def raised() -> Iterator[tuple[str, str, str]]:
    """Yield file, code and line of each error of ddpkit and of a project's own files."""
    files = list((ROOT / "ddpkit").rglob("*.py")) + list(TEMPLATE.rglob("*.py"))
    for path in sorted(files):
        # the project's own tests, wherever the repository lies
        is_test = "tests" in path.relative_to(ROOT).parts
        if is_test or TEMPLATE / "ddpkit" in path.parents:
            continue
        for scope in ast.walk(ast.parse(path.read_text())):
            if not isinstance(scope, ast.FunctionDef):
                continue
            nodes = list(ast.walk(scope))
            inner = [each for each in nodes[1:] if isinstance(each, ast.FunctionDef)]
            of_others = {id(node) for each in inner for node in ast.walk(each)}
            for node in nodes:
                if not isinstance(node, ast.Call) or id(node) in of_others:
                    continue
                if ast.unparse(node.func).split(".")[-1] in ERRORS:
                    for text in texts(node.args[0], scope):
                        yield str(path), f"{path.stem}.{scope.name.strip('_')}", text


def explained() -> list[str]:
    """Return the codes that are explained, in the order of the page."""
    return re.findall(r"^### `(.+)`$", EXPLAINED.read_text(), re.MULTILINE)


def page() -> str:
    return HEAD + EXPLAINED.read_text()


def messages() -> str:
    lines = []
    for code, text in sorted({(code, text) for _, code, text in raised()}):
        line = f"| `{code}` | {text} |\n".replace("\\", "\\\\")
        lines.append(line.replace("<", "\\<"))
    return TABLE + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    MESSAGES.write_text(messages())
