"""What documents and tests name is there: tests, flags, names of ddpkit, files, variables,
commands, and the names that tests patch. What belongs to others is listed here, by whose it is.
"""

import ast
import builtins
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pages
from pages import ROOT, TEMPLATE
from ranks import OWNED

import ddpkit
from ddpkit import __main__ as commands

TESTS = ROOT / "tests"
PROMISES = TESTS / "promises.md"
DOCUMENTS = {name: text for name, _, _, text in pages.documents()}
DOCUMENTS["tests/promises.md"] = PROMISES.read_text()
del DOCUMENTS["docs/migration.md"]  # names what earlier versions had

FLAGS = {
    "torch": "--standalone --nproc-per-node --nnodes --rdzv-backend --rdzv-endpoint --rdzv-id "
    "--max-restarts --master-port --log-dir --tee --numa-binding",
    "SLURM": "--array --cpus-per-task --exclude --gpus-per-node --gpus-per-task "
    "--kill-on-bad-exit --nodes --ntasks-per-node --signal",
    "git": "--check",
    "docker": "--build-arg --gpus --ipc --pids-limit",
    "TensorBoard": "--logdir",
    "mpirun": "--bind-to",
    "TensorRT": "--fp16 --int8 --onnx --saveEngine",
    "uv": "--frozen --no-annotate --no-hashes --no-header --python-version --universal",
    "cookiecutter": "--checkout --no-input",
    "copier": "--trust",
    "pre-commit": "--all-files",
}
FILES = {
    "Tiny ImageNet": "val_annotations.txt",
    "images for an example": "0000.jpg 1_2.jpg 2.jpg 3.jpg cat.0.jpg image.jpg mask.png p12_3.jpg",
    "a file that a diff of EDITS.md makes": "adversary.py",
    "what onnxruntime writes": "model_int8.onnx prepared.onnx",
    "timm": "train.py",
    "a flag file of a user's own": "my.txt",
    "codes of errors": "folder.lock",
    "names of other programs' data": "1_mask.png _mask.png class_dict.csv "
    "class_names.txt label_colors.txt",
}
VARIABLES = {
    "torch": "PET_MASTER_ADDR PET_NODE_RANK PYTORCH_ENABLE_MPS_FALLBACK",
    "AMD and Intel": "HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK",
    "nccl": "NCCL_DEBUG NCCL_SOCKET_IFNAME",
    "GPUs": "HIP_VISIBLE_DEVICES PYTORCH_ENABLE_MPS_FALLBACK ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK",
    "MPI": "OMPI_COMM_WORLD_RANK",
    "SkyPilot": "MOUNT_CACHED SKYPILOT_NODE_IPS SKYPILOT_NODE_RANK",
    "Ray": "STRICT_SPREAD",
    "trackers": "MLFLOW_TRACKING_URI WANDB_MODE",
    "the tests": "OF_THE_TASK TEST_SEED",
    "SLURM": "SLURM_ARRAY_TASK_ID",
    "Zed": "ZED_WORKTREE_ROOT",
}
WORDS = {
    "ddpkit": "NAME DOOR",  # any name of the door, and their table
}


def code() -> Iterator[str]:
    """The text of each file of the repository that is code or configuration, but for the tests."""
    for folder in (ROOT / "ddpkit", TEMPLATE, ROOT / "benchmarks", ROOT / "hooks"):
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(ROOT).as_posix()
            is_text = path.suffix not in (".md", ".pyc") and "cache" not in parts
            if path.is_file() and is_text:
                yield path.read_text()
    for name in ("Makefile", "pyproject.toml", "mkdocs.yml"):
        yield (ROOT / name).read_text()


CODE = "\n".join(code())
SHELL = "\n".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.sh"))


def unknown(
    pattern: str, known: set[str], others: dict[str, str]
) -> list[tuple[str, str]]:
    """What documents name by `pattern` and is neither known nor of others, each with its place."""
    listed = set(" ".join(others.values()).split())
    named = [
        (name, found)
        for name, text in DOCUMENTS.items()
        for found in re.findall(pattern, text)
    ]
    faults = [(at, found) for at, found in named if found not in known | listed]
    unused = listed - {found for _, found in named}
    faults += [("listed", each) for each in sorted(unused)]
    return faults + [("listed, but ours", each) for each in sorted(listed & known)]


def test_flags() -> None:
    added = r'add(?:_argument)?\(\s*"(--[a-z0-9-]+)"'  # also by diffs of EDITS.md
    text = "\n".join([CODE, *DOCUMENTS.values()])
    known = {"--help", "--local-rank", "--local_rank", "--debug", "--debug-rank"}
    known.update(re.findall(added, text), re.findall(r"(--[a-z-]+)\)", SHELL))
    assert unknown(r"(?<![\w-])--[a-z][A-Za-z0-9_-]*", known, FLAGS) == []


def test_names_of_ddpkit() -> None:
    known = {path.stem for path in (ROOT / "ddpkit").iterdir()}
    known.update(ddpkit.DOOR)
    assert unknown(r"\bddpkit\.(\w+)", known, WORDS) == []


def test_files() -> None:
    kinds = "py|sh|md|txt|json|csv|pt|pth|toml|yml|png|npy|jpg|sbatch|onnx|lock"
    pattern = rf"(?<![\w.*-])[\w.-]*\w\.(?:{kinds})\b"
    known = {path.name for path in all_files()} | set(re.findall(pattern, CODE))
    assert unknown(pattern, known, FILES) == []


def all_files() -> Iterator[Path]:
    yield from ROOT.glob("*")
    yield from TEMPLATE.rglob("*")
    for name in "docs", "tests", "ddpkit", "benchmarks", "hooks", ".github":
        yield from (ROOT / name).rglob("*")


def test_variables() -> None:
    """Those with an underscore."""
    pattern = r"(?<![\w{-])[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9]\b"
    known = set(re.findall(pattern, CODE))
    for flag in re.findall("--[a-z-]+", CODE):  # its placeholder in --help
        known.add(flag[2:].upper().replace("-", "_"))
    assert unknown(pattern, known, VARIABLES) == []


def test_commands() -> None:
    known = {"launch"}.union(commands.ON_CPU, commands.COMMANDS)
    assert unknown(r"(?:-m |`)ddpkit ([a-z]\w*)", known, {}) == []
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    make = r"(?:`|^ *)(?:\w+=\S* )*make ([a-z]+)(?=[^\n]*`|  |$)"
    assert unknown(make, targets, {}) == []


def test_promises() -> None:
    """Each row names tests of that name, in a file and a class that have them."""
    rows = re.findall(r"^\| (.*) \| (.*) \|$", PROMISES.read_text(), re.M)[2:]
    assert len(rows) > 100
    path = TESTS
    for promise, named in rows:
        assert "refuse" not in promise, "write: fails with a one-line error"
        found = re.findall(r"`([^`]+)`", named)
        assert found, promise
        for each in found:
            if "/" in each:
                file, _, each = each.partition("::")
                path = next(p for p in (TESTS / file, ROOT / file, TESTS) if p.exists())
                assert path != TESTS, f"{promise}: no file {file}"
            if path.suffix == ".py":
                assert has(path, each), f"{promise}: {path.name} has no {each}"


def has(path: Path, name: str) -> bool:
    """Whether a file of tests has this test, "Class::test", class, or (name "") any test."""
    nodes: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in filter(None, name.split("::")):
        nodes = [node for node in nodes if getattr(node, "name", None) == part]
        if not nodes:
            return False
        nodes = nodes[0].body if isinstance(nodes[0], ast.ClassDef) else nodes
    names = [getattr(node, "name", "") for node in nodes]
    return any(name.startswith(("test_", "Test")) for name in names)


def test_names_that_tests_patch() -> None:
    """A name that is gone would be set all the same, and the test would test something else."""
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        gone = [name for name in patched(ast.parse(text)) if not exists(name)]
        quiet = re.findall(r'setattr\(\w+, "(\w+)",.*raising=False', text)
        gone += [name for name in quiet if not hasattr(builtins, name)]
        assert gone == [], path.name


def patched(tree: ast.AST, known: dict[str, str] | None = None) -> Iterator[str]:
    """Yield the dotted names of modules' and classes' attributes that this code assigns to.

    known: what each name stands for in the code around it.
    """
    nodes = list(of_scope(tree))
    known = dict(known or {})
    for name in names(nodes):
        known.pop(name, None)
    known |= imports(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            first, _, rest = ast.unparse(node).partition(".")
            if first in known:
                yield f"{known[first]}.{rest}"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node is not tree:
            yield from patched(node, known)
        elif isinstance(node, ast.Constant) and "import " in str(node.value):
            try:  # code that a test plants
                planted = ast.parse(textwrap.dedent(node.value))
            except SyntaxError:
                continue
            yield from patched(planted)


def names(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield parameters and variables."""
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def imports(nodes: list[ast.AST]) -> dict[str, str]:
    """Return what each imported name stands for."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def of_scope(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module or function, without what is in functions in it."""
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def exists(name: str) -> bool:
    """Whether a dotted name is there; what nothing has imported yet is not looked at."""
    module, *rest = name.split(".")
    if module != "ddpkit" and module not in OWNED and module not in sys.modules:
        return True
    if module in OWNED:  # another project's may be imported
        paths = TEMPLATE.rglob(f"{module}.py")
        return any(re.search(rf"\b{rest[0]}\b", path.read_text()) for path in paths)
    value = importlib.import_module(module)
    for part in rest:
        if not hasattr(value, part):
            try:
                importlib.import_module(f"{value.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        value = getattr(value, part)
        if value is None:  # what it is later, within a run, is not known here
            return True
    return True
