"""Find collectives that not all ranks reach, by reading code: python -m engine.check.lockstep FILES

Such as a reduce_tensor under `if rank == 0`, where rank 0 would wait for the others. Prints a line
for each and exits with 1; with 2 if a file cannot be read. The comment `# lockstep: ok`, on the
line of the collective or on that of the cause, switches it off. It needs nothing but Python.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

COLLECTIVE = re.compile(  # the end of the dotted name of a call
    r"(^|\.)(all_(gather|reduce|to_all)\w*|(monitored_)?barrier|(broadcast|gather|scatter)_object\w*"
    r"|reduce_scatter\w*|new_group|gather_for_metrics|full_tensor|wait_for_everyone|backward"
    r"|DDP|DistributedDataParallel|await_rank_zero|check_same|ddp_model|divide_gradients"
    r"|end_(epoch|step)|find_checkpoint|from_rank(_zero)?|mean_loss|rank_zero_first|rehearse"
    r"|reduce_tensor|start_sum|stoppable|sync_(buffers|networks)"
    # Tensors and others have methods of these names.
    r"|(accelerator|c10d|dist|distributed|fabric|sharded)\.(broadcast|gather|reduce|scatter)"
    r"|engine\.(Run|batches|class_weights|compute|find_classes|find_masks|load_weights)"
    r"|engine\.(setup|shard|teardown|wrap)|run\.(batches|loss|save))$"
)
WRAPPERS = {"DDP", "DistributedDataParallel", "engine.wrap", "replicas.wrap"}
RANK = re.compile(  # names of what differs from rank to rank
    r"_?((ddp|dist|get|global|group|local|my|node|this|world)_)*rank(_zero|_0|_id)?"
    r"|(get_)?(local_)?process_index|(is_)?(local_|world_)?(main|master)_(process|rank)"
    r"|is_(local_|global_|world_)?(chief|main|master|primary|rank_zero|rank_0|zero|process_zero)"
    r"|slurm_(localid|nodeid|procid)",
    re.IGNORECASE,
)
GROUP = re.compile(r"^group=(?!None|.*WORLD)|(group|_pg|\bpg)$")  # arguments: a part of the ranks
ONE_RANK = {"await_rank_zero", "from_rank", "from_rank_zero"}  # what they are given runs on one
IN_TURNS = {"local_main_process_first", "main_process_first", "rank_zero_first"}
ALIKE = re.compile("ImportError|StopIteration")  # raised on all ranks or on none
OFF = re.compile(r"#.*\blockstep:\s*ok\b")
UNEVEN = "runs on some ranks only"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
OPERATORS = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.NamedExpr, ast.Tuple, ast.UnaryOp)
Node = ast.stmt | ast.expr | ast.ExceptHandler
Site = tuple[ast.expr, str]  # a call that starts a collective, and its name
Fault = tuple[Site, Node, str, str]  # a collective, its cause, the words for it, the remedy


def name_of(node: ast.AST, parts: int = 1) -> str:
    """Return the last `parts` of the name of a variable, or of what a call calls."""
    node = node.func if isinstance(node, ast.Call) else node
    is_name = isinstance(node, ast.Name | ast.Attribute)
    return ".".join(ast.unparse(node).split(".")[-parts:]) if is_name else ""


def text(node: ast.AST) -> str:
    line = ast.unparse(node).split("\n")[0].rstrip(":")
    return f"`{line}`" if len(line) <= 60 else f"`{line[:57]}...`"


def names(sites: Iterable[Site]) -> list[str]:
    return [name for _, name in sites]


def difference(one: Sequence[Site], other: Sequence[Site]) -> list[Site]:
    """Return the sites of both, without those at the start and at the end that are the same."""
    while one and other and one[0][1] == other[0][1]:
        one, other = one[1:], other[1:]
    while one and other and one[-1][1] == other[-1][1]:
        one, other = one[:-1], other[:-1]
    return [*one, *other]


class Code:
    """A file of code: which calls are collectives, and what differs by rank."""

    def __init__(self, source: str) -> None:
        self.source, self.lines, self.tree = source, source.split("\n"), ast.parse(source)
        self.nodes = [*ast.walk(self.tree)]
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.differing: set[tuple] = set()  # variables, as `keys` returns them
        self.wrapped: set[tuple] = set()
        self.functions: dict[str, str] = {}  # of this file, and a collective that each starts
        for node in self.nodes * 2:  # what is assigned may be used above
            value = getattr(node, "value", None)
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if value and isinstance(target, ast.Name | ast.Attribute):
                    if self.differs(value):
                        self.differing.add(self.keys(target)[0])
                    if {name_of(value), name_of(value, 2)} & WRAPPERS:
                        self.wrapped.add(self.keys(target)[0])
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.update((node.name, name) for _, name in self.sites(node.body)[:1])

    def above(self, node: ast.AST, kinds: tuple[type, ...] = FUNCTIONS) -> ast.AST:
        """Return the innermost of `kinds` that `node` is in, or the whole file."""
        node = self.parents.get(node, self.tree)
        while node is not self.tree and not isinstance(node, kinds):
            node = self.parents[node]
        return node

    def keys(self, node: ast.AST) -> list[tuple[ast.AST | None, str]]:
        """Return a variable's name with each function that it is in; an attribute's with None."""
        scopes = [node]
        while scopes[-1] is not self.tree and isinstance(node, ast.Name):
            scopes.append(self.above(scopes[-1]))
        return [(scope, name_of(node)) for scope in scopes[1:]] or [(None, name_of(node))]

    def differs(self, node: ast.AST) -> bool:
        """Return whether the value of an expression differs from rank to rank."""
        name = name_of(node)
        if name and name not in ("bool", "get", "getenv", "int", "range"):
            return bool(RANK.fullmatch(name) or self.differing.intersection(self.keys(node)))
        if isinstance(node, ast.Subscript | ast.Call):
            given = node.args if isinstance(node, ast.Call) else [node.slice]
            keys = [str(each.value) for each in given if isinstance(each, ast.Constant)]
            return any(map(RANK.fullmatch, keys)) or any(map(self.differs, given))
        if isinstance(node, ast.Compare):
            asked = f"{type(node.ops[0]).__name__} {ast.unparse(node.comparators[0])}"
            if re.search("None$|-1$|(GtE|Lt) 0$", asked):  # whether there are ranks at all
                return False
        return isinstance(node, OPERATORS) and any(map(self.differs, ast.iter_child_nodes(node)))

    def is_own(self, test: ast.expr) -> bool:
        """Return whether a condition asks if a number is finite, where none is reduced before."""
        if not re.search(r"\bis(finite|inf|nan)\(", ast.unparse(test)):
            return False
        return not re.search("reduce|gather|broadcast", ast.unparse(self.above(test)))

    def collective(self, call: ast.Call) -> str:
        """Return the name of the collective that `call` starts, or ""."""
        name, whole = name_of(call), name_of(call, 2)
        given = [ast.unparse(each) for each in (*call.args, *call.keywords)]
        if any(map(GROUP.search, given)):
            return name if name == "new_group" else ""
        is_metric = name == "compute" and not given and "torchmetrics" in self.source
        if COLLECTIVE.search(whole) or is_metric or self.wrapped.intersection(self.keys(call.func)):
            return name
        inner = self.functions.get(name) if whole in (name, f"self.{name}", f"cls.{name}") else ""
        return f"{name} ({inner.split(' (')[0]})" if inner else ""

    def sites(self, nodes: Iterable[ast.AST]) -> list[Site]:
        """Return the collectives in `nodes`, in order; once if both sides of an `if` have them."""
        found: list[Site] = []
        for node in nodes:
            if isinstance(node, ast.If):
                one, other = self.sites(node.body), self.sites(node.orelse)
                found += self.sites([node.test]) + one
                found += other if names(one) != names(other) else []
            elif not isinstance(node, FUNCTIONS):
                found += self.sites(ast.iter_child_nodes(node))
                if isinstance(node, ast.Call) and (name := self.collective(node)):
                    found.append((node, name))
        return found

    def block(self, node: ast.AST) -> list[ast.AST]:
        """Return the statements among which `node` is."""
        fields = [value for _, value in ast.iter_fields(self.parents[node])]
        return next((each for each in fields if isinstance(each, list) and node in each), [node])

    def exit_of(self, block: Sequence[ast.stmt]) -> ast.stmt | None:
        """Return the first statement that leaves `block`, but for a raise: that ends all ranks."""
        nodes = [node for each in block for node in ast.walk(each)]
        for node in nodes:
            if isinstance(node, ast.Return) and self.above(node) is self.above(block[0]):
                return node
            if isinstance(node, ast.Break | ast.Continue) and self.above(node, LOOPS) not in nodes:
                return node
        return None

    def following(self, node: ast.AST, exit: ast.AST) -> list[ast.AST]:
        """Return what the ranks run after `node` that do not take the `exit` in it."""
        found: list[ast.AST] = []
        while node is not self.above(exit):
            found += self.block(node)[self.block(node).index(node) + 1 :]
            node, inner = self.parents[node], node
            if isinstance(node, LOOPS) and inner in node.body:
                found = found if isinstance(exit, ast.Continue) else [*node.body]  # once more
                if not isinstance(exit, ast.Return):
                    return found
        return found

    def faults_of_if(self, node: ast.If, remedy: str) -> Iterator[Fault]:
        """Compare what ranks do that take the `if` with what the others do."""
        one, other, rest = self.sites(node.body), self.sites(node.orelse), list[Site]()
        exits = self.exit_of(node.body), self.exit_of(node.orelse)
        if (exit := exits[0] or exits[1]) and not all(exits):
            rest = self.sites(self.following(node, exit))
        above = self.parents[node]
        is_elif = isinstance(above, ast.If) and above.orelse == [node] and self.differs(above.test)
        if is_elif and not node.orelse and not rest:
            return  # it is for the ranks that do not take the `if`
        found = difference(one, other + rest) if exits[0] else difference(one + rest, other)
        for site in found:
            if site not in rest:
                yield site, node, f"{UNEVEN} ({text(node)}", "move it out of the if"
        if exit and (after := [site for site in found if site in rest]):
            yield after[0], exit, f"{UNEVEN} ({text(exit)} under {text(node)}", remedy

    def faults_of(self, node: Node) -> Iterator[Fault]:
        """Yield the collectives that `node` keeps from some ranks."""
        found: list[Site] = []
        why, remedy = UNEVEN, "move it out of there"
        if isinstance(node, ast.If) and self.differs(node.test):
            yield from self.faults_of_if(node, "leave on all ranks or on none")
        elif isinstance(node, ast.If) and self.is_own(node.test):
            yield from self.faults_of_if(node, "reduce the condition over the ranks first")
        elif isinstance(node, ast.IfExp) and self.differs(node.test):
            found = difference(self.sites([node.body]), self.sites([node.orelse]))
        elif isinstance(node, ast.BoolOp) and any(differing := [*map(self.differs, node.values)]):
            found = self.sites(node.values[differing.index(True) + 1 :])
        elif isinstance(node, ast.While | ast.For):
            if self.differs(node.test if isinstance(node, ast.While) else node.iter):
                found, why = self.sites(node.body), "runs more often on some ranks"
        elif isinstance(node, ast.ExceptHandler) and not ALIKE.search(text(node)):
            found, remedy = self.sites(node.body), "let all ranks agree on it after the try"
            if isinstance(self.exit_of(node.body), ast.Break | ast.Continue):
                found += self.sites(getattr(self.parents[node], "body", []))  # which it leaves out
        elif isinstance(node, ast.With):
            if {name_of(item.context_expr) for item in node.items} & IN_TURNS:
                found, why = self.sites(node.body), "runs while other ranks wait for their turn"
        elif isinstance(node, ast.Call) and name_of(node) in ONE_RANK:
            why = "runs on one rank only"
            calls = [ast.Call(each, [], []) for each in node.args]  # of functions that it is given
            found = self.sites(each.body for each in node.args if isinstance(each, ast.Lambda))
            found += [(call.func, name) for call in calls if (name := self.collective(call))]
        yield from ((site, node, f"{why} ({text(node)}", remedy) for site in found)


def check(source: str) -> list[str]:
    """Return a line for each fault in the code of a file, without the file's name."""
    code, lines = Code(source), dict[tuple[int, int], str]()
    for node in (node for node in code.nodes if isinstance(node, Node)):
        for (call, name), cause, why, remedy in code.faults_of(node):
            own = [*code.lines[call.lineno - 1 : call.end_lineno], code.lines[cause.lineno - 1]]
            if not any(map(OFF.search, own)):
                place = call.lineno, len(own[0].encode()[: call.col_offset].decode()) + 1
                line = f"{name} {why}, line {cause.lineno}): it would wait forever; {remedy}"
                lines.setdefault(place, line)
    return [f"{line}:{column}: {text}" for (line, column), text in sorted(lines.items())]


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
