"""What names say of code that is not run: which calls are collectives, which values differ by rank.

It needs nothing but Python, for pre-commit.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator

COLLECTIVES = {  # on whatever object they are called
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast_object_list", "gather_for_metrics", "full_tensor"),
    *("gather_object", "monitored_barrier", "new_group", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter_object_list", "wait_for_everyone", "DDP", "DistributedDataParallel", "backward"),
    *("await_rank_zero", "check_same", "ddp_model", "divide_gradients", "end_epoch", "end_step"),
    *("find_checkpoint", "from_rank", "from_rank_zero", "gather_objects", "mean_loss"),
    *("rank_zero_first", "rehearse", "reduce_tensor", "start_sum", "stoppable", "sync_buffers"),
    *("sync_networks",),
}
OF_MODULES = {"broadcast", "gather", "reduce", "scatter"}  # tensors have methods of these names
MODULES = {"accelerator", "c10d", "dist", "distributed", "fabric", "sharded"}
OF_ENGINE = {  # others have such names, too
    *("Run", "batches", "class_weights", "compute", "find_classes", "find_masks", "load_weights"),
    *("setup", "shard", "teardown", "wrap"),
}
OF_RUN = {"batches", "loss", "save"}
WRAPPERS = {"DDP", "DistributedDataParallel", "engine.wrap", "replicas.wrap"}
RANK = re.compile(  # names of what differs from rank to rank
    r"_?((ddp|dist|get|global|group|local|my|node|this|world)_)*rank(_zero|_0|_id)?|"
    r"(get_)?(local_)?process_index|(is_)?(local_|world_)?(main|master)_(process|rank)|"
    r"is_(local_|global_|world_)?(chief|main|master|primary|rank_zero|rank_0|zero|process_zero)|"
    r"slurm_(localid|nodeid|procid)",
    re.IGNORECASE,
)
OWN = re.compile("^(from|import) engine", re.MULTILINE)
OPERATORS = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.NamedExpr, ast.Tuple, ast.UnaryOp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Site = tuple[ast.expr, str]  # a call that starts a collective, and its name
Names = set[tuple[ast.AST | None, str]]  # variables with their function; attributes with None


def inside(*nodes: ast.AST) -> Iterator[ast.AST]:
    """Yield `nodes` and all within them, without the functions that they define."""
    for node in nodes:
        if not isinstance(node, FUNCTIONS):
            yield node
            yield from inside(*ast.iter_child_nodes(node))


def called(node: ast.AST, parts: int = 1) -> str:
    """Return the last `parts` of the dotted name of what a call calls; "" of anything else."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return ".".join(name.split(".")[-parts:])


def names(sites: Iterable[Site]) -> list[str]:
    return [name for _, name in sites]


class Code:
    """A file of code."""

    def __init__(self, source: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the code that is read
            self.tree = ast.parse(source)
        self.source, self.lines = source, source.split("\n")
        nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.differing: Names = set()
        self.wrapped: Names = set()
        for _ in range(2):  # what is assigned may be used above
            for node in nodes:
                self.learn(node)
        self.functions: dict[str, str] = {}  # of this file, and a collective that each starts
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.update((node.name, name) for _, name in self.sites(node.body)[:1])

    def learn(self, node: ast.AST) -> None:
        """Note which names an assignment gives to what differs by rank, and to DDP."""
        value = getattr(node, "value", None)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if value and isinstance(target, ast.Name | ast.Attribute):
                function = self.above(node) if isinstance(target, ast.Name) else None
                key = function, ast.unparse(target).split(".")[-1]
                if self.differs(value):
                    self.differing.add(key)
                if {called(value), called(value, 2)} & WRAPPERS:
                    self.wrapped.add(key)

    def above(self, node: ast.AST, kinds: tuple[type, ...] = FUNCTIONS) -> ast.AST:
        """Return the innermost of `kinds` that `node` is in, or the whole file."""
        node = self.parents.get(node, self.tree)
        while node is not self.tree and not isinstance(node, kinds):
            node = self.parents[node]
        return node

    def is_among(self, known: Names, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return (None, node.attr) in known
        scopes = [node]
        while scopes[-1] is not self.tree:
            scopes.append(self.above(scopes[-1]))
        return any((scope, getattr(node, "id", "")) in known for scope in scopes)

    def differs(self, node: ast.AST) -> bool:
        """Return whether the value of an expression differs from rank to rank."""
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            return bool(RANK.fullmatch(name)) or self.is_among(self.differing, node)
        if isinstance(node, ast.Call) and called(node) not in ("bool", "get", "getenv", "int"):
            return bool(RANK.fullmatch(called(node)))
        if isinstance(node, ast.Subscript | ast.Call):
            given = node.args[:1] if isinstance(node, ast.Call) else [node.slice]
            keys = [str(each.value) for each in given if isinstance(each, ast.Constant)]
            return any(map(RANK.fullmatch, keys)) or any(map(self.differs, given))
        if isinstance(node, ast.Compare):
            asked = f"{type(node.ops[0]).__name__} {ast.unparse(node.comparators[0])}"
            if re.search("None$|-1$|(GtE|Lt) 0$", asked):  # whether there are ranks at all
                return False
        return isinstance(node, OPERATORS) and any(map(self.differs, ast.iter_child_nodes(node)))

    def is_own(self, test: ast.expr) -> bool:
        """Return whether a condition asks if a number is finite, where none is reduced before."""
        finite = {"isfinite", "isinf", "isnan"}
        if not any(called(each) in finite for each in inside(test)):
            return False
        return not re.search("reduce|gather|broadcast", ast.unparse(self.above(test)))

    def collective(self, call: ast.Call) -> str:
        """Return the name of the collective that `call` starts, or ""."""
        name, owner = called(call), called(call, 2).split(".")[0]
        given = [ast.unparse(each) for each in (*call.args, *call.keywords)]
        if any(re.search(r"^group=(?!None|.*WORLD)|(group|_pg|\bpg)$", each) for each in given):
            return name if name == "new_group" else ""  # others are for the ranks of that group
        if (
            name in COLLECTIVES
            or (name in OF_MODULES and owner in MODULES)
            or (name == "compute" and not given and "torchmetrics" in self.source)
            or (name in OF_ENGINE and owner == "engine")
            or (name in OF_RUN and owner == "run" and re.search(OWN, self.source))
            or self.is_among(self.wrapped, call.func)
        ):
            return name
        is_own = isinstance(call.func, ast.Name) or owner in ("self", "cls")
        inner = self.functions.get(name, "") if is_own else ""
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
