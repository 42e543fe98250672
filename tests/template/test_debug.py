"""F5, as VS Code does it: every launch configuration, every way to stop, attaching to a rank."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import generated
import pytest
import torch
import torch.distributed as dist
from dap import F5, Debugger, Session, configuration, line_of, task
from generated import LEAN, NET, ROOT, Project, in_soak, texts, wait_for
from ports import free_port

import ddpkit
from ddpkit.ranks import distributed

LOOP = " loss = "  # in the training loop; calls the library
BACKWARD = "scaler.scale(loss).backward()"
FIRST_READ = "self.open(index)"  # in __getitem__
WRAP = "ddp_model = DistributedDataParallel("
AFTER_WRAP = "ddp_model.broadcast_buffers"

# Ranks that add numbers from a loader worker, without end; they start in half of
# main.py's time.
ENDLESS = """
from ddpkit.ranks import children, handlers

handlers.install_handlers()
handlers.say_start()

import torch
from torch.utils.data import DataLoader

from ddpkit.ranks import distributed, failures, workers


class Numbers:
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return index + 1


if __name__ == "__main__":  # the project's tests import main
    with failures.one_line_errors():
        here = distributed.rendezvous()
        torch.distributed.init_process_group(
            here.backend, None, here.timeout, here.world_size, here.rank, here.store
        )
        rank = distributed.rank()
        how = {"num_workers": 1, "multiprocessing_context": workers.worker_context(1)}
        for number in DataLoader(Numbers(), worker_init_fn=children.start_worker, **how):
            distributed.reduce_tensor(number)
"""
SUM = "distributed.reduce_tensor(number)"


@pytest.fixture
def own(project: Project, tmp_path: Path) -> Project:
    """A copy of the project with a copy of ddpkit, where breakpoints and F11 tell it from main."""
    copy = project.copy(tmp_path / "its own")
    (copy.folder / "ddpkit").unlink()
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ddpkit", copy.folder / "ddpkit", ignore=ignored)
    return copy


@pytest.fixture
def endless(own: Project) -> Project:
    (own.folder / "main.py").write_text(ENDLESS)
    return own


def debugging(
    project: Project, *flags: object, at: tuple = (), **answers: str
) -> Debugger:
    """A window in which F5 has been pressed, with a breakpoint at a text in a file."""
    debugger = Debugger(project.folder)
    words = shlex.join(texts(flags))
    debugger.set(*at)
    name = answers.pop("name", F5)
    debugger.launch(configuration(project.folder, name, flags=words, **answers))
    return debugger


def shown(rank: Session) -> dict[str, str]:
    """What the locals of the frame are, as the debugger shows them."""
    scopes = rank.ask("scopes", {"frameId": rank.frame["id"]})["scopes"]
    place = {"variablesReference": scopes[0]["variablesReference"]}
    found = rank.ask("variables", place)["variables"]
    return {each["name"]: each["value"] for each in found}


def test_a_debugging_session(
    own: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From F5 to the end of the run, in both ranks; on few images, with a short timeout."""
    data = own.draw(tmp_path / "own data", 16, 6)  # the path has a blank
    # What other packages do when the interpreter ends, which the debugger does not wait
    # for.
    late = "\nimport atexit, time\natexit.register(time.sleep, 1)\n"
    lean = Path(LEAN, "sitecustomize.py").read_text()
    (tmp_path / "sitecustomize.py").write_text(lean + late)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    main = own.folder / "main.py"
    flags = own.flags(data, "runs/debug", "--image-size", 32, "--dist-timeout", 1)
    with debugging(own, flags, at=("model.py", "args.tta:")) as debugger:
        assert {rank.frame["name"] for rank in debugger.stopped()} == {"infer"}
        debugger.set("main.py", WRAP)
        for number, rank in enumerate(debugger.go()):
            assert rank.threads()[0] == f"rank {number}"
            assert len(rank.threads()) > 1  # else VS Code does not show its name
            assert rank.evaluate("torch.distributed.get_rank()") == str(number)
        held = debugger.held()[0]
        typed = {"text": "torch.distributed.", "column": 19}
        offered = held.ask("completions", {"frameId": held.frame["id"], **typed})
        names = {target["label"] for target in offered["targets"]}
        assert {"all_reduce", "reduce_op"} <= names  # without torch's warning of one
        for rank in debugger.go("next"):  # over DDP(model), which waits for all ranks
            assert rank.frame["line"] == line_of(main, AFTER_WRAP)

        debugger.set("dataset.py", FIRST_READ)
        for rank in debugger.go():
            assert rank.frame["name"] == "__getitem__"
            assert rank.evaluate("index").isdecimal()
        debugger.set("main.py", LOOP)
        for number, rank in enumerate(debugger.go()):
            assert rank.evaluate("rank") == str(number)
            same = "len(images) == len(outputs) == len(targets)"
            assert rank.evaluate(same) == "True"
            rows = rank.evaluate('ddpkit.on_all_ranks("images")').splitlines()
            for other, row in enumerate(rows):
                what = f"rank {other}: (4, 3, 32, 32) float32 cpu, mean "
                assert row.startswith(what)
                assert f"; at main.py:{rank.frame['line']}" in row
            assert "differs" not in rows[0]
            assert "; differs from rank 0 in images[0]; at " in rows[1]
            images = shown(rank)["images"]  # in VS Code's pane "Variables"
            assert images.startswith("(4, 3, 32, 32) float32 cpu, mean ")
            assert ": tensor([[[[" in images
            rows = rank.evaluate('ddpkit.on_all_ranks("ddp_model")').splitlines()
            assert "differs" not in "".join(rows)  # after the average of the gradients
            assert len(rows) == 2
        for rank in debugger.go("stepIn"):  # F11, over what is the library's
            assert rank.frame["line"] == line_of(main, "scaler.scale(loss).backward()")
            assert rank.evaluate("loss.ndim") == "0"
        ranks = debugger.go("next")  # over backward(), where DDP reduces the gradients
        assert {rank.frame["name"] for rank in ranks} == {"train_one_epoch"}

        debugger.set("main.py", LOOP, condition="rank == 1")
        (only,) = debugger.go(count=1)
        since = time.monotonic()
        assert only.evaluate("rank") == "1"
        rows = only.evaluate('ddpkit.on_all_ranks("rank")').splitlines()
        assert re.fullmatch(r"rank 0: at main.py:\d+: in collective .*", rows[0])
        assert re.fullmatch(r"rank 1: 1; at main.py:\d+: .*", rows[1])
        ask = task(own.folder, "Where is it?", output="runs/debug")
        subprocess.run([ask["command"], *ask["args"]], cwd=own.folder, check=True)
        place = rf"^rank 1, .*at main.py:{only.frame['line']}"
        debugger.wait(lambda: re.search(place, debugger.text, re.M), "where rank 1 is")
        debugger.wait(lambda: time.monotonic() > since + 2, "more than --dist-timeout")
        assert debugger.held() == [only]  # and rank 0 in a collective

        debugger.set()
        only.go()
        assert debugger.finish() == 0
        assert "done: best" in debugger.all_end()


@pytest.mark.soak
@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_stopping_one_rank(own: Project, few: Path) -> None:
    """In the files that differ between the tasks; Stop, pressed on one rank, ends both."""
    at = "dataset.py", FIRST_READ
    with debugging(own, own.flags(few, "runs/debug"), at=at) as debugger:
        assert {rank.frame["name"] for rank in debugger.stopped()} == {"__getitem__"}
        debugger.set("losses.py", "return cross_entropy(")
        ranks = debugger.go()
        assert {rank.frame["name"] for rank in ranks} == {"cross_entropy"}
        ranks[1].disconnect()
        debugger.all_end()


WAYS: dict[str, tuple[int, Callable[[Debugger], None]]] = {
    "top session": (2, Debugger.stop),
    "closed window": (2, Debugger.close),
    "Ctrl-C": (3, Debugger.interrupt),
    "killed adapter": (2, lambda debugger: debugger.adapter.kill()),
}


IN_SOAK = ("closed window", "killed adapter")
SOME = [in_soak(way) if way in IN_SOAK else way for way in WAYS]


@pytest.mark.parametrize("way", SOME)
def test_stopping_at_a_breakpoint(endless: Project, way: str) -> None:
    """In the ranks, or in their loader workers while the ranks wait for those."""
    count, end = WAYS[way]
    worker = ", worker 0" if way == "killed adapter" else ""
    is_in_code = way == "Ctrl-C"
    if is_in_code:
        main = endless.folder / "main.py"
        main.write_text(main.read_text().replace(SUM, f"breakpoint()\n        {SUM}"))
    at = () if is_in_code else ("main.py", "return index" if worker else SUM)
    with debugging(endless, at=at, processes=str(count)) as debugger:
        names = [each.threads()[0] for each in debugger.stopped(count)]
        assert names == [f"rank {number}{worker}" for number in range(count)]
        end(debugger)
        debugger.all_end()


def test_stopping_a_running_training(own: Project, few: Path) -> None:
    """Ctrl+F5, and Stop while ranks compute and wait for each other."""
    flags = texts([NET, "--weights", "none", "--data", few, "--epochs", 9999])
    words = shlex.join(flags)
    with Debugger(own.folder) as debugger:
        debugger.launch(configuration(own.folder, F5, flags=words), debug=False)
        debugger.wait(lambda: "epoch 1/9999" in debugger.text, "the first epoch")
        debugger.stop()
        debugger.all_end()


def test_continuing_a_run(own: Project, few: Path, tmp_path: Path) -> None:
    """A run that has failed goes on where it was saved, and is held where it fails again."""
    main = own.folder / "main.py"
    end = "        run.end_step(losses, count, grad_norm)\n"
    fails = f"{end}        if run.step == 2:\n            raise ValueError('torn')\n"
    assert end in main.read_text()
    main.write_text(main.read_text().replace(end, fails))
    out = tmp_path / "a run"
    failed = own.train(few, out, "--save-every", 1)
    assert failed.status == 1 and "torn" in failed.err
    flags = own.flags(few, out, "--save-every", 1)
    at = flags.index("--output-dir")
    del flags[at : at + 2]
    answers = {"name": "Continue a run", "output": shlex.quote(str(out))}
    with debugging(own, *flags, **answers) as debugger:
        for rank in debugger.stopped():
            assert rank.frame["line"] == line_of(main, "raise ValueError")
            assert rank.evaluate("run.step, step") == "(2, 1)"
        debugger.stop()
        debugger.all_end()


def test_one_process(own: Project, few: Path) -> None:
    """The rank stops, then its loader worker; Disconnect of the worker ends the rank, too."""
    flags = own.flags(few, "runs/debug", "--workers", 1)
    at = "dataset.py", FIRST_READ
    with debugging(own, flags, at=at, name="One process") as debugger:
        # one to build the network, two of the sanity check
        assert debugger.stopped(1)[0].evaluate("__name__") == "'dataset'"
        for _ in range(2):
            debugger.go(count=1)
        (worker,) = debugger.go(count=1)
        assert worker.threads()[0] == "rank 0, worker 0"
        debugger.set("main.py", LOOP)
        assert debugger.go(count=1)[0].evaluate("rank") == "0"
        debugger.set("dataset.py", FIRST_READ)
        (worker,) = debugger.go(count=1)
        worker.disconnect()
        debugger.all_end()


def test_as_several_ranks(
    project: Project, own: Project, few: Path, tmp_path: Path
) -> None:
    """In one process it stops at what rank 3 of four has, to the last digit."""
    flags = own.flags(few, "runs/debug", "--batch-size", 2)
    condition = {"condition": "rank == 3"}
    name = "As 4 ranks, in one process"
    debugger = Debugger(own.folder)
    debugger.set("main.py", BACKWARD, **condition)
    debugger.launch(configuration(own.folder, name, flags=shlex.join(texts(flags))))
    with debugger:
        (process,) = debugger.stopped(1)
        assert process.evaluate("rank") == "3"
        assert process.stop["description"] == "virtual rank 3 of 4: breakpoint"
        (row,) = process.evaluate('ddpkit.on_all_ranks("rank")').splitlines()
        assert row.startswith("rank 0: 3; virtual rank 3 of 4, at main.py:")
        there = process.evaluate("loss.item(), images.sum().item()")
        debugger.stop()
        debugger.all_end()

    def patch() -> None:
        backward = torch.Tensor.backward

        def noted(loss: torch.Tensor, *words: object) -> None:
            values = sys._getframe(1).f_locals
            if int(os.environ["RANK"]) == 3 and "images" in values:
                numbers = loss.item(), values["images"].sum().item()
                print("rank 3:", numbers, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            backward(loss, *words)

        torch.Tensor.backward = noted

    # DistributedDataParallel's ranks, without virtual ones
    real = project.train(few, tmp_path / "out", "--batch-size", 2, on=4, patch=patch)
    assert f"rank 3: {there}" in real.out


@pytest.mark.parametrize("name", [F5, "One process"])
def test_a_wrong_flag(own: Project, name: str) -> None:
    """It is said in one line before anything is imported, and all end without a key."""
    model = own.folder / "model.py"
    model.write_text("print('imports')\n" + model.read_text())
    with debugging(own, ["--epochs=-3"], at=("main.py", LOOP), name=name) as debugger:
        if name == F5:  # the task before it fails, so torch's launcher does not start
            assert not debugger.sessions
        else:
            assert debugger.finish() == 2
            assert not generated.left(30)
            debugger.wait(lambda: all(each.ended for each in debugger.sessions), "end")
        lines = debugger.text.split("\n")
        error = "error: --epochs: -3 is not an integer of 1 or more"
        assert [line.startswith(error) for line in lines].count(True) == 1
        assert "(main.py --help lists the flags)" in debugger.text
        assert {line for line in lines if not line.startswith(error)} <= {""}


@pytest.mark.parametrize("name", [F5, "One process"])
def test_torch_is_imported_unseen_by_the_debugger(
    own: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It would take twice as long. What follows, at the top of main.py, is seen.

    Nothing is held before it, with "Raised Exceptions", too.
    """
    monkeypatch.setattr(Session, "filters", ("raised", "uncaught"))
    # As that of the extension, which is no package of the interpreter.
    installed = Path(importlib.util.find_spec("debugpy").origin).parent
    shutil.copytree(installed, tmp_path / "bundled" / "debugpy")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'bundled'}:{LEAN}")
    text = "import ddpkit\n\nddpkit.before_imports()\n"
    text += "import torchmetrics\n\nafter = torchmetrics.inside\n"
    (own.folder / "main.py").write_text(text)
    (own.folder / "torchmetrics.py").write_text("inside = 1\n")
    with Debugger(own.folder) as debugger:
        for file, line in ("torchmetrics.py", 1), ("main.py", 6):
            debugger.breakpoints[file] = [{"line": line}]
        answers = {"processes": "1"} if name == F5 else {}
        debugger.launch(configuration(own.folder, name, **answers))
        (session,) = debugger.stopped(1)
        assert session.stop["reason"] == "breakpoint", session.frame
        assert session.frame["source"]["path"] == str(own.folder / "main.py")
        assert session.evaluate("torchmetrics.inside") == "1"
        session.go()
        assert debugger.finish() == 0


@pytest.mark.parametrize("who", [in_soak("rank 1"), "both ranks", "ddpkit"])
def test_a_mistake_is_held_where_it_is_made(own: Project, few: Path, who: str) -> None:
    """Of ddpkit's own errors that is the line which calls it; then all end, the error last."""
    main = own.folder / "main.py"
    text = main.read_text()
    old = "scheduler=scheduler,"
    new = f"{old} epoch=scheduler,"
    held = "run = ddpkit.Run("
    error = "[loop.parts]"
    ranks = "1"
    is_own = who != "ddpkit"
    if is_own:
        text = ENDLESS
        old = SUM
        condition = "rank == 0" if who == "rank 1" else "rank > 1"
        new = f"assert {condition}, 'planted'\n            {SUM}"
        held = error = "planted"
        ranks = "2"
    assert text.count(old) == 1
    main.write_text(text.replace(old, new))
    with debugging(own, own.flags(few, "runs/debug"), processes=ranks) as debugger:
        for rank in debugger.stopped(2 if who == "both ranks" else 1):
            assert error in rank.error()
            assert rank.frame["line"] == line_of(main, held)
        rank.go()
        debugger.finish()
        assert not generated.left(30)
        lines = debugger.text.splitlines()
        last = lines[-1]
        assert lines.count(f"starting {ranks} rank(s) ...") == 1
        assert error in last
        assert ("AssertionError: " if is_own else "error: ") in last
        assert debugger.text.count("Traceback") == is_own


def test_a_mistake_above_everything(own: Project) -> None:
    """Both ranks are held there, but not torch's launcher, which fails with them."""
    (own.folder / "main.py").write_text("import missing\n")
    with debugging(own) as debugger:
        for rank in debugger.stopped():
            assert "No module named 'missing'" in rank.error()
        for rank in debugger.held():
            rank.go()
        assert debugger.finish() == 1
        assert not debugger.held()
        assert not generated.left(30)
        assert not debugger.left_files()


def test_a_test_file(endless: Project) -> None:
    """It stops in the test and in the ranks that the test starts; Stop of a rank ends all tests."""
    file = endless.folder / "tests" / "test_one.py"
    begun = endless.folder / "the second test has begun"
    text = "from test_project import launch\n"
    text += "def test_one():\n    flags = []\n    launch(2)\n"
    text += f"def test_two():\n    open({str(begun)!r}, 'w').close()\n    launch(2)\n"
    file.write_text(text)
    # what test_project.py imports, and these tests do not use: it would import much
    for name in "ddp", "recipe", "predict":
        (endless.folder / f"{name}.py").write_text("")
    names = "AUGMENTATIONS = build_datasets = draw_demo = parse_args = None\n"
    for name in "dataset", "flags":
        (endless.folder / f"{name}.py").write_text(names)
    at = "tests/test_one.py", "flags = []"
    with debugging(endless, at=at, name="This test file", file=str(file)) as debugger:
        assert debugger.stopped(1)[0].evaluate("launch.__name__") == "'launch'"
        debugger.set("main.py", SUM)
        ranks = debugger.go()
        assert [rank.evaluate("rank") for rank in ranks] == ["0", "1"]
        ranks[1].disconnect()
        # debugpy's launcher may hear of the end too early: then neither status nor output of
        # pytest comes through, but what a test has done stays.
        debugger.finish()
        assert not generated.left(30)
        assert not [name for name in debugger.left_files() if "ddp-" in name]
        assert not begun.exists()


@pytest.mark.soak
def test_predict(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """As a comment of launch.json says."""
    image = next((data / "val").rglob("*.jpg"))
    config = configuration(project.folder, "One process")
    config["program"] = config["program"].replace("main.py", "predict.py")
    words = image, "--checkpoint", trained / "best.pt", "--output", tmp_path
    config["args"] = shlex.join(map(str, words))
    with Debugger(project.folder) as debugger:
        debugger.set("predict.py", "torch.inference_mode")
        debugger.launch(config)
        (session,) = debugger.stopped(1)
        debugger.set()
        session.go()
        assert debugger.finish() == 0
        debugger.all_end()
    assert any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_run_joins_the_debugger_of_its_terminal(
    own: Project, few: Path, tmp_path: Path
) -> None:
    """--debug in a terminal of VS Code, whose extension attaches to what a file of it names."""
    endpoint = tmp_path / "endpoints" / "endpoint.txt"
    endpoint.parent.mkdir()
    endpoint.write_text("left by a run that was killed")
    flags = own.flags(few, tmp_path, "--image-size", 32, "--dist-timeout", 1)
    flags += ["--debug", f"all:{free_port()}", "--workers", 1]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {
        "VSCODE_DEBUGPY_ADAPTER_ENDPOINTS": str(endpoint),
        "TMPDIR": str(temporary),
    }
    with Debugger(own.folder) as debugger:
        debugger.set("main.py", LOOP)
        run = own.launch(flags, **env)
        wait_for(lambda: not endpoint.exists(), 60)
        wait_for(endpoint.exists)
        connect = json.loads(endpoint.read_text())["client"]
        time.sleep(1)  # longer than --dist-timeout
        # One session, which tells of the other ranks as of its children.
        debugger.attach({"connect": connect, "justMyCode": True})
        wait_for(lambda: not endpoint.exists(), 60)
        for number, rank in enumerate(debugger.stopped()):
            assert rank.stop["description"] == f"rank {number}: breakpoint"
            assert rank.threads() == [f"rank {number}", "watch"]
        main = own.folder / "main.py"
        for rank in debugger.go("stepIn"):  # over what is the library's
            assert rank.frame["line"] == line_of(main, "scaler.scale(loss).backward()")

        ask = task(own.folder, "continue all ranks")
        debugger.set("main.py", "scheduler.step()")
        held = debugger.held()
        subprocess.run([ask["command"], *ask["args"]], cwd=own.folder, check=True)
        debugger.wait(
            lambda: not any(rank.stop["reason"] == "step" for rank in debugger.held()),
            "both continue",
        )
        assert set(debugger.stopped()) == set(held)
        held[1].disconnect()  # Stop, of one rank
        debugger.wait(lambda: all(rank.ended for rank in held), "both end")
        assert run.end().left == []
        wait_for(lambda: not [*temporary.glob("ddp-*")], 10)


@pytest.mark.soak
def test_attach_to_ranks_of_two_nodes(
    project: Project, few: Path, tmp_path: Path
) -> None:
    """--debug-rank: each listens on loopback, waits longer than the timeout, can be left again."""
    debug_port = free_port(2)
    env = {
        "NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NPROC": "1",
    }
    more = ["--debug-rank", f"1,0:{debug_port}", "--dist-timeout", 2]
    flags = project.flags(few, tmp_path, more)
    with Debugger(project.folder) as debugger:
        debugger.set("main.py", LOOP)
        nodes = [
            project.launch(
                flags, NODE_RANK=str(number), SLURMD_NODENAME=f"n{number}", **env
            )
            for number in range(2)
        ]
        lines = [node.process.stderr.readline() for node in nodes]
        since = time.monotonic()
        for number, line in enumerate(lines):
            host, port = re.search(r"host (\S+), port (\d+) \(", line).groups()
            assert host == "127.0.0.1"
            assert int(port) == debug_port + number
            assert listening(int(port)) == [f"0100007F:{int(port):04X}"]
            debugger.wait(
                lambda: time.monotonic() > since + 2, "more than --dist-timeout"
            )
            debugger.attach(
                configuration(
                    project.folder, "Attach to all ranks", host=host, port=port
                )
            )
        for number, rank in enumerate(debugger.stopped()):
            assert rank.threads()[0] == f"rank {number}"
            assert rank.evaluate("rank") == str(number)
            rank.disconnect()
        assert [node.end().ok().err for node in nodes] == ["", ""]
    assert (tmp_path / "last.pt").exists()


def listening(port: int) -> list[str]:
    """The addresses, in hexadecimals, at which anything listens on `port`."""
    lines = Path("/proc/net/tcp").read_text().splitlines()
    lines += Path("/proc/net/tcp6").read_text().splitlines()
    ends = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    return [end for end in ends if end.endswith(f":{port:04X}")]


def test_debug_rank_that_cannot_be(project: Project, few: Path, tmp_path: Path) -> None:
    flags = project.flags(few, tmp_path)
    done = project.run(flags, "--debug-rank", 1, on=1)
    done.refused("attaching.wait_for_debugger", "--debug 1", "0 to 0")
    done = project.run(flags, "--debug-rank", "one", on=1)
    done.refused("flags.error", "--debug-rank", "one")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = project.run(flags, "--debug-rank", f"0:{port}", on=1)
        done.refused("attaching.wait_for_debugger", f"127.0.0.1:{port}", "R:PORT")


def test_debug_in_a_terminal_without_debugpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """VS Code's Python extension begins with the first Python file, and new terminals know it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("BUNDLED_DEBUGPY_PATH", raising=False)
    told = (
        r"no debugpy: python -m pip install debugpy .*open main.py, then a new terminal"
    )
    with pytest.raises(ddpkit.UserError, match=told):
        ddpkit.Parser.ranks("all")
    monkeypatch.setenv("BUNDLED_DEBUGPY_PATH", "/extension/libs/debugpy")
    monkeypatch.setattr(sys, "path", [])
    assert ddpkit.Parser.ranks("1") == ([1], 5678)
    assert sys.path == ["/extension/libs"]


def test_without_a_debugger_nothing_of_it_is_there(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    def look() -> None:
        names = sorted(thread.name for thread in threading.enumerate())
        timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        print("seen:", names, timeout, {"debugpy", "pydevd"} & set(sys.modules))

    def patch() -> None:
        distributed.teardown = look

    flags = ["--eval-only", "--resume", trained / "best.pt", "--dist-timeout", 77]
    done = project.train(data, tmp_path, flags, on=1, patch=patch).ok()
    assert "seen: ['MainThread', 'watch'] 0:01:17 set()" in done.out


def imports_torch(pid: int) -> bool:
    return "libtorch_cpu.so" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("moment", ["killed", "begins", "imports torch"])
def test_a_launcher_that_ends_at_once(
    project: Project, tmp_path: Path, moment: str
) -> None:
    """Killed before the ranks have begun; Ctrl-C as it begins, or while the ranks import torch."""
    go = tmp_path / "go"
    held = "import os, time\n"
    held += f"while 'RANK' in os.environ and not os.path.exists({str(go)!r}):\n"
    held += "    time.sleep(0.01)\n"
    (tmp_path / "sitecustomize.py").write_text(held if moment == "killed" else "")
    command = project.launch(PYTHONPATH=str(tmp_path))
    if moment == "killed":
        wait_for(lambda: len(command.ranks()) == 2)
    else:
        assert command.process.stdout.readline() == "starting 2 rank(s) ...\n"
    if moment == "imports torch":
        wait_for(lambda: any(map(imports_torch, command.ranks().values())))
    command.kill(signal.SIGKILL if moment == "killed" else signal.SIGINT)
    go.touch()
    done = command.end()
    assert moment == "killed" or done.status in (128 + signal.SIGINT, -signal.SIGINT)
    assert done.err == ""
    assert done.left == []
