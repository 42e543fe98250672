"""Find collectives that not all ranks reach, by reading code: python -m engine.check.lockstep FILES

Such as a reduce_tensor under `if rank == 0`, where rank 0 would wait for the others. Prints a line
for each and exits with 1; with 2 if a file cannot be read. The comment `# lockstep: ok`, on the
line of the collective or on that of the cause, switches it off.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.check.calls import Code, Site, called, inside, names

Node = ast.stmt | ast.expr | ast.ExceptHandler
Fault = tuple[Site, Node, str, str]  # a collective, its cause, the words for it, the remedy
ON_ONE_RANK = {"await_rank_zero", "from_rank", "from_rank_zero"}  # what they are given runs there
IN_TURNS = {"local_main_process_first", "main_process_first", "rank_zero_first"}
LOOPS = (ast.For, ast.AsyncFor, ast.While)
ALIKE = re.compile("ImportError|StopIteration")  # raised on all ranks or on none
OFF = re.compile(r"#.*\blockstep:\s*ok\b")
UNEVEN = "runs on some ranks only"


def text(node: ast.AST) -> str:
    line = ast.unparse(node).split("\n")[0].rstrip(":")
    return f"`{line}`" if len(line) <= 60 else f"`{line[:57]}...`"


def difference(one: Sequence[Site], other: Sequence[Site]) -> list[Site]:
    """Return the sites of both, without those at the start and at the end that are the same."""
    while one and other and one[0][1] == other[0][1]:
        one, other = one[1:], other[1:]
    while one and other and one[-1][1] == other[-1][1]:
        one, other = one[:-1], other[:-1]
    return [*one, *other]


def first_exit(code: Code, block: Sequence[ast.stmt]) -> ast.stmt | None:
    """Return the first statement that leaves `block`."""
    nodes = list(inside(*block))
    for node in nodes:
        if isinstance(node, ast.Return | ast.Raise):
            return node
        if isinstance(node, ast.Break | ast.Continue) and code.above(node, LOOPS) not in nodes:
            return node
    return None


def following(code: Code, node: ast.AST, exit: ast.AST) -> list[ast.AST]:
    """Return what the ranks run after `node` that do not take the `exit` in it."""
    found: list[ast.AST] = []
    while node is not code.above(exit):
        parent = code.parents[node]
        for block in (getattr(parent, name, []) for name in ("body", "orelse", "finalbody")):
            found += block[block.index(node) + 1 :] if node in block else []
        if isinstance(parent, LOOPS) and node in parent.body:
            if isinstance(exit, ast.Continue):
                return found
            found = list(parent.body)  # which they begin again
            if isinstance(exit, ast.Break):
                return found
        elif isinstance(parent, ast.Try) and node in parent.body:
            if isinstance(exit, ast.Raise):
                return found
            found += parent.orelse
        node = parent
    return [] if isinstance(exit, ast.Raise) else found  # if nothing catches it, all ranks end


def is_negative(node: ast.If) -> bool:
    """Return whether it asks, by its words, for the ranks that are not the first."""
    return bool(re.search(r"\bnot\b|!=|>", ast.unparse(node.test)))


def is_answered(code: Code, node: ast.If) -> bool:
    """Return whether another `if` is for the ranks that do not take this one.

    As an elif is, or `if rank == 0: barrier()` after `if rank > 0: barrier()` and some work.
    """
    own, parent = names(code.sites(node.body)), code.parents[node]
    if node.orelse:
        return False
    if isinstance(parent, ast.If) and parent.orelse == [node] and code.differs(parent.test):
        return True
    blocks = (getattr(parent, name, []) for name in ("body", "orelse", "finalbody"))
    ifs = [each for block in blocks for each in block if isinstance(each, ast.If)]
    ifs = [each for each in ifs if is_negative(each) != is_negative(node)]
    others = [names(code.sites(each.body)) for each in ifs if code.differs(each.test)]
    return set(own) <= {"barrier", "wait_for_everyone"} and own in others


def faults_of_if(code: Code, node: ast.If, remedy: str) -> Iterator[Fault]:
    """Compare what ranks do that take the `if` with what the others do."""
    one, other = code.sites(node.body), code.sites(node.orelse)
    exits, rest = (first_exit(code, node.body), first_exit(code, node.orelse)), list[Site]()
    if (exit := exits[0] or exits[1]) and not all(exits):
        rest = code.sites(following(code, node, exit))
    if not rest and is_answered(code, node):
        return
    found = difference(one, other + rest) if exits[0] else difference(one + rest, other)
    for site in found:
        if site not in rest:
            yield site, node, f"{UNEVEN} ({text(node)}", "move it out of the if"
    if exit and (after := [site for site in found if site in rest]):
        yield after[0], exit, f"{UNEVEN} ({text(exit)} under {text(node)}", remedy


def faults_of(code: Code, node: Node) -> Iterator[Fault]:
    """Yield the collectives that `node` keeps from some ranks."""
    found: list[Site] = []
    why, remedy = UNEVEN, "move it out of there"
    if isinstance(node, ast.If) and code.differs(node.test):
        yield from faults_of_if(code, node, "leave on all ranks or on none")
    elif isinstance(node, ast.If) and code.is_own(node.test):
        yield from faults_of_if(code, node, "reduce the condition over the ranks first")
    elif isinstance(node, ast.IfExp) and code.differs(node.test):
        found = difference(code.sites([node.body]), code.sites([node.orelse]))
    elif isinstance(node, ast.BoolOp) and any(differing := [*map(code.differs, node.values)]):
        found = code.sites(node.values[differing.index(True) + 1 :])
    elif isinstance(node, ast.Match) and code.differs(node.subject):
        cases = [code.sites(case.body) for case in node.cases]
        if ast.unparse(node.cases[-1]).startswith("case _:"):
            *cases, default = cases
        else:
            default = []
        found = [site for case in cases for site in difference(case, default)]
    elif isinstance(node, ast.While) and code.differs(node.test):
        found, why = code.sites(node.body), "runs more often on some ranks"
    elif isinstance(node, ast.For) and called(node.iter) == "range":
        if any(map(code.differs, ast.iter_child_nodes(node.iter))):
            found, why = code.sites(node.body), "runs more often on some ranks"
    elif isinstance(node, ast.ExceptHandler) and not ALIKE.search(text(node)):
        found, remedy = code.sites(node.body), "let all ranks agree on it after the try"
        if isinstance(first_exit(code, node.body), ast.Break | ast.Continue):
            found += code.sites(getattr(code.parents[node], "body", []))  # which it leaves out
    elif isinstance(node, ast.With):
        if {called(item.context_expr) for item in node.items} & IN_TURNS:
            found, why = code.sites(node.body), "runs while other ranks wait for their turn"
    elif isinstance(node, ast.Call) and called(node) in ON_ONE_RANK:
        why = "runs on one rank only"
        for given in node.args:
            if isinstance(given, ast.Lambda):
                found += code.sites([given.body])
            elif isinstance(given, ast.Name | ast.Attribute):
                name = code.collective(ast.Call(given, [], []))
                found += [(given, name)] if name else []
    yield from ((site, node, f"{why} ({text(node)}", remedy) for site in found)


def check(source: str) -> list[str]:
    """Return a line for each fault in the code of a file, without the file's name."""
    code, lines = Code(source), dict[tuple[int, int], tuple[str, str, int, str]]()
    for node in (node for node in ast.walk(code.tree) if isinstance(node, Node)):
        for (call, name), cause, why, remedy in faults_of(code, node):
            own = [*code.lines[call.lineno - 1 : call.end_lineno], code.lines[cause.lineno - 1]]
            if not any(map(OFF.search, own)):
                place = call.lineno, len(own[0].encode()[: call.col_offset].decode()) + 1
                lines.setdefault(place, (name, why, cause.lineno, remedy))
    return [
        f"{line}:{column}: {name} {why}, line {of}): it would wait forever; {remedy}"
        for (line, column), (name, why, of, remedy) in sorted(lines.items())
    ]


def main(files: Sequence[str]) -> int:
    """Print the faults in all files, those in this folder if none are given; return the status."""
    status = 0
    own = (path for path in sorted(Path().rglob("*.py")) if "site-packages" not in path.parts)
    for file in files or own:
        try:
            with tokenize.open(file) as opened:
                lines = check(opened.read())
            status = max(status, min(len(lines), 1))
        except (SyntaxError, ValueError, OSError, RecursionError) as error:
            place = f"{getattr(error, 'lineno', 1) or 1}:{getattr(error, 'offset', 1) or 1}"
            reason = getattr(error, "msg", getattr(error, "strerror", error))
            lines, status = [f"{place}: cannot be read: {reason}"], 2
        for line in lines:
            print(f"{file}:{line}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
