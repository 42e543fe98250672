"""What a project uses of ddpkit, and the sizes of the files that people edit."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT, TASKS, TEMPLATE_FOLDER

import ddpkit

FOLDER = ROOT / TEMPLATE_FOLDER
LINES = {"main": 220, "recipe": 150, "distributed": 100, "dataset": 120, "model": 100}
LINES |= {"losses": 100, "predict": 60}
IN_ALL = {"classification": 750, "segmentation": 900}  # of all Python but the tests


def rooms(task: str) -> dict[str, str]:
    """The code of the files that people edit, by name."""
    paths = [*FOLDER.glob("*.py"), *(FOLDER / "tasks" / task).glob("*.py")]
    return {path.stem: path.read_text() for path in paths}


def used(code: str) -> set[str]:
    """Which names of ddpkit it uses."""
    return {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ddpkit"
    }


@pytest.mark.parametrize("task", TASKS)
def test_sizes(task: str) -> None:
    sizes = {name: len(code.splitlines()) for name, code in rooms(task).items()}
    assert {name: size for name, size in sizes.items() if size > LINES.get(name, 70)} == {}
    assert sum(sizes.values()) <= IN_ALL[task]


@pytest.mark.parametrize("task", TASKS)
def test_names(task: str) -> None:
    found = rooms(task)
    assert len(used(found["main"])) <= 20
    names = set().union(*map(used, found.values()))
    assert len(names) <= 35
    assert names <= ddpkit.DOOR.keys()
    for name, code in found.items():
        for line in re.findall(r"^ *(?:import|from) ddpkit\b.*", code, re.MULTILINE):
            assert line == "import ddpkit", name


def test_each_name_is_what_a_type_checker_takes_it_for() -> None:
    (block,) = (
        node
        for node in ast.parse((FOLDER / "ddpkit/__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {
        (alias.name, alias.asname, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {(name, None, f"ddpkit.{module}") for name, module in ddpkit.DOOR.items()}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ddpkit.nothing


@pytest.mark.parametrize("name", ddpkit.DOOR)
def test_each_name_says_how_it_is_used(name: str) -> None:
    """An indented example that uses it, and the error that it raises."""
    value = getattr(ddpkit, name)
    text = inspect.getdoc(value) or ""
    examples = re.findall(r"^ {4}.*", text, re.MULTILINE)
    assert any(re.search(rf"\b{name}\b", line) for line in examples), text
    if "raise UserError" in inspect.getsource(value):
        assert "UserError" in text


def test_it_imports_no_torch() -> None:
    code = "import ddpkit, sys; ddpkit.Parser, ddpkit.at_least, ddpkit.UserError, ddpkit.prepare"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-B", "-c", code], cwd=FOLDER, check=True, timeout=60)


@pytest.mark.parametrize("task", TASKS)
def test_flags_without_torch(task: str, tmp_path: Path) -> None:
    """The help fits on two screens; a wrong flag is said once. Both before torch is imported."""
    for path in (FOLDER / "main.py", FOLDER / "tasks" / task / "flags.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    (tmp_path / "ddpkit").symlink_to(FOLDER / "ddpkit")

    def start(rank: int, *words: str) -> subprocess.Popen:
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env["DDP_JOB"] = str(tmp_path)  # of a batch job, which is not to be started again
        command, pipe = [sys.executable, "-B", "main.py", *words], subprocess.PIPE
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True)

    out, err = start(0, "--help").communicate(timeout=60)
    assert not err
    assert len(out.splitlines()) < 80
    flags = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", out, re.MULTILINE))
    assert {"--data", "--help", "--dist-timeout"} < flags
    assert len(flags) <= 40
    ranks = [start(rank, "--epoch", "3") for rank in range(2)]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert said[1] == ("", "")
    assert re.fullmatch(r"error: .*--epoch 3.*\n", said[0][1])
    assert (tmp_path / "mistake").exists()
