"""F5, as VS Code does it: every launch configuration, every way to stop, attaching to a rank."""

import os
import re
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dap import Breakpoints, Debugger, configuration, line_of, task
from ports import free_port
from running import (
    NETS,
    SAME_FOR_BOTH,
    SCRIPTS,
    Project,
    edited,
    finish,
    flags,
    in_place_of_main,
    processes,
    small,
    start,
)

F5 = "DDP: torch.distributed.launch"
SUM = "distributed.reduce_tensor(number)"  # of scripts/endless.py
LOOP = "loss = run.loss("  # a line of the training loop, which calls the library
FIRST_READ = "self.open(index)"  # in __getitem__
ALARMING = re.compile(r"Traceback|Error|Warning|Killed|Terminated|Aborted|\b[EWF]\d{4} ")


def at(project: Project, file: str, text: str, **more: str) -> Breakpoints:
    return {file: [{"line": line_of(project.folder / file, text), **more}]}


def f5(project: Path, *flags: str) -> dict[str, Any]:
    """The first configuration, with flags typed when it asks for them."""
    return configuration(project, F5, flags=shlex.join(flags))


@pytest.fixture
def endless(project: Project, tmp_path: Path) -> Project:
    """A copy of the project with scripts/endless.py in place of main.py."""
    return in_place_of_main(project, tmp_path / "endless", "endless.py")


@SAME_FOR_BOTH
def test_a_debugging_session(project: Project, tmp_path: Path) -> None:
    """From F5 to the end of the run, in both ranks; on few pictures, with a short timeout."""
    data = project.draw(tmp_path / "own data", 16, 6)  # the path has a blank
    more = ["--data", str(data), *small(data), "--image-size", "32", "--dist-timeout", "2"]
    config = f5(project.folder, *more)
    # What other packages do when the interpreter ends, which the debugger does not wait for.
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, time\natexit.register(time.sleep, 1)"
    )
    config["env"]["PYTHONPATH"] = str(tmp_path)
    main = project.folder / "main.py"
    wrap = line_of(main, "ddp_model = ddpkit.wrap(")
    with Debugger(project.folder, {"main.py": [{"line": wrap}]}) as debugger:
        debugger.launch(config)
        ranks = debugger.stopped()
        for number, rank in enumerate(ranks):
            assert rank.frame["line"] == wrap
            assert rank.threads()[0] == f"rank {number}"
            assert len(rank.threads()) > 1  # else VS Code does not show its name
            assert rank.evaluate("ddpkit.rank()") == str(number)
            rank.go("next")  # over DDP(model), which waits for all ranks
        ranks = debugger.stopped()
        after = line_of(main, "train_loss = train_one_epoch(")
        assert {rank.frame["line"] for rank in ranks} == {after}

        debugger.set(at(project, "dataset.py", FIRST_READ))
        for rank in ranks:
            rank.go()
        ranks = debugger.stopped()
        assert all(rank.frame["name"] == "__getitem__" for rank in ranks)
        assert all(rank.evaluate("index").isdecimal() for rank in ranks)

        debugger.set(at(project, "model.py", "nn.functional.cross_entropy("))
        for rank in ranks:
            rank.go()
        ranks = debugger.stopped()
        assert all(rank.frame["name"] == "forward" for rank in ranks)

        debugger.set(at(project, "main.py", LOOP))
        for rank in ranks:
            rank.go()
        for number, rank in enumerate(debugger.stopped()):
            assert rank.evaluate("(rank, i)") == f"({number}, 0)"
            assert rank.evaluate("len(images) == len(outputs) == len(targets)") == "True"
            rank.go("stepIn")  # F11, over what is the library's
        ranks = debugger.stopped()
        for rank in ranks:
            assert rank.frame["line"] == line_of(main, "scaler.scale(loss).backward()")
            assert rank.evaluate("loss.ndim") == "0"
            rank.go("next")  # over backward(), where DDP reduces the gradients
        ranks = debugger.stopped()
        assert {rank.frame["name"] for rank in ranks} == {"train_one_epoch"}

        debugger.set(at(project, "main.py", LOOP, condition="rank == 1"))
        for rank in ranks:
            rank.go()
        (only,) = debugger.stopped(1)
        assert only.evaluate("rank") == "1"
        time.sleep(3)  # more than --dist-timeout, with rank 0 in a collective
        ask = task(project.folder, "Where is it?", output="runs/debug")
        words = [ask["command"], *ask["args"]]
        subprocess.run(words, cwd=project.folder, check=True)
        time.sleep(8)  # the other rank answers, too
        place = f"at main.py:{only.frame['line']}"
        assert re.search(rf"^rank 1, .*{place}", debugger.text, re.M), debugger.text
        assert debugger.held() == [only]

        debugger.set({})
        only.go()
        assert debugger.finish() == 0
        assert "done: best" in debugger.text
        assert not debugger.left(5)
        assert not ALARMING.search(debugger.text)


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_stopping_one_rank(project: Project, data: Path) -> None:
    """In the files that differ between the tasks; Stop, pressed on one rank, ends both."""
    with Debugger(project.folder, at(project, "dataset.py", FIRST_READ)) as debugger:
        debugger.launch(f5(project.folder, "--data", str(data), *small(data)))
        assert all(rank.frame["name"] == "__getitem__" for rank in debugger.stopped())
        debugger.set(at(project, "losses.py", "return cross_entropy(outputs"))
        for rank in debugger.stopped():
            rank.go()
        ranks = debugger.stopped()
        assert all(rank.frame["name"] == "cross_entropy" for rank in ranks)
        ranks[1].disconnect()
        assert not debugger.left(5)
        assert not ALARMING.search(debugger.text), debugger.text


WAYS: dict[str, Callable[[Debugger], None]] = {
    "top session": Debugger.stop,
    "closed window": Debugger.close,
    "killed adapter": lambda debugger: debugger.adapter.kill(),
}


@SAME_FOR_BOTH
@pytest.mark.parametrize("way", WAYS)
def test_stopping_at_a_breakpoint(endless: Project, way: str) -> None:
    """In the ranks, or in their loader workers while the ranks wait for those."""
    place = "return index" if way == "killed adapter" else SUM
    with Debugger(endless.folder, at(endless, "main.py", place)) as debugger:
        debugger.launch(f5(endless.folder))
        names = [each.threads()[0] for each in debugger.stopped()]
        worker = ", worker 0" if way == "killed adapter" else ""
        assert names == [f"rank {number}{worker}" for number in range(2)]
        WAYS[way](debugger)
        assert not debugger.left(5)
        assert not ALARMING.search(debugger.text), debugger.text


@SAME_FOR_BOTH
def test_three_ranks(endless: Project) -> None:
    """At a breakpoint, and Ctrl-C."""
    with Debugger(endless.folder, at(endless, "main.py", SUM)) as debugger:
        debugger.launch(configuration(endless.folder, F5, processes="3"))
        for number, rank in enumerate(debugger.stopped(3)):
            assert rank.evaluate("(rank, local_rank)") == f"({number}, {number})"
        debugger.interrupt()
        assert not debugger.left(5)
        assert not ALARMING.search(debugger.text), debugger.text


@SAME_FOR_BOTH
def test_step_into_ddpkit(project: Project, data: Path) -> None:
    """F11 in the configuration for that."""
    answers = {"flags": shlex.join(["--data", str(data), *small(data)]), "processes": "1"}
    with Debugger(project.folder, at(project, "main.py", LOOP)) as debugger:
        debugger.launch(configuration(project.folder, "DDP: step into ddpkit", **answers))
        (rank,) = debugger.stopped(1)
        rank.go("stepIn")
        (rank,) = debugger.stopped(1)
        assert rank.frame["source"]["path"].endswith("ddpkit/run/loop.py")
        assert rank.frame["name"] == "loss"


@SAME_FOR_BOTH
def test_one_process(project: Project, data: Path) -> None:
    """The rank stops, then its loader worker; Disconnect of the worker ends the rank, too."""
    more = shlex.join(["--data", str(data), *small(data), "--workers", "1"])
    with Debugger(project.folder, at(project, "main.py", LOOP)) as debugger:
        debugger.launch(configuration(project.folder, "One process", flags=more))
        (rank,) = debugger.stopped(1)
        assert rank.evaluate("rank") == "0"
        debugger.set(at(project, "dataset.py", FIRST_READ))
        rank.go()
        (worker,) = debugger.stopped(1)
        assert worker.threads()[0] == "rank 0, worker 0"
        worker.disconnect()
        assert not debugger.left(5)
        assert not ALARMING.search(debugger.text), debugger.text


@SAME_FOR_BOTH
@pytest.mark.parametrize("debug", [True, False])
def test_stopping_a_running_training(project: Project, debug: bool) -> None:
    """Ctrl-C while ranks compute and wait for each other; Ctrl+F5 and then Stop."""
    with Debugger(project.folder) as debugger:
        more = [*NETS[project.task], "--image-size", "32", "--epochs", "99", "--workers", "1"]
        debugger.launch(f5(project.folder, *more), debug)
        steps = re.compile(r"epoch 1/99: +[1-9]\d*%")
        debugger.wait(lambda: steps.search(debugger.text), "the first steps")
        assert len(debugger.processes()) > 5
        if debug:
            debugger.interrupt()
        else:
            debugger.stop()
        assert not debugger.left(5)
        assert not ALARMING.search(debugger.text), debugger.text


@SAME_FOR_BOTH
def test_a_rank_that_raises(project: Project, data: Path, tmp_path: Path) -> None:
    """The debugger stops at breakpoint() in the code, and where one rank raises; then all end."""
    planted = 'if rank == 1:\n            raise ValueError("planted")\n        '
    planted = f"breakpoint()\n        {planted}"
    change = "is_last = ", planted + "is_last = "
    folder = edited(project, tmp_path / "copy", change).folder
    main = folder / "main.py"
    raising = line_of(main, "planted")
    with Debugger(folder) as debugger:
        debugger.launch(f5(folder, "--data", str(data), *small(data)))
        for number, rank in enumerate(debugger.stopped()):
            assert rank.evaluate("(rank, i)") == f"({number}, 0)"
            assert raising - 2 <= rank.frame["line"] < raising
            rank.go()
        (only,) = debugger.stopped(1)
        assert only.stop["reason"] == "exception"
        assert only.frame["line"] == raising
        assert only.evaluate("rank") == "1"
        only.go()
        assert not debugger.left(5)
        assert debugger.text.splitlines()[-1].endswith("ValueError: planted")
        assert debugger.text.count("Traceback") == 1
        assert debugger.finish() != 0


@SAME_FOR_BOTH
def test_a_mistake_of_the_user_is_held_where_it_was_raised(
    project: Project, data: Path, tmp_path: Path
) -> None:
    """In the rank that raised it only; then the one line is printed, and all ends."""
    folder = project.copy(tmp_path / "copy").folder
    dataset = folder / "dataset.py"
    planted = 'if ddpkit.rank() == 1:\n            raise ddpkit.UserError(f"planted in {index}")\n'
    before, after = dataset.read_text().split("        (image,) = self.open(index)")
    dataset.write_text(f"{before}        {planted}        (image,) = self.open(index){after}")
    with Debugger(folder) as debugger:
        debugger.launch(f5(folder, "--data", str(data), *small(data)))
        (only,) = debugger.stopped(1)
        assert only.stop["reason"] == "exception"
        assert only.frame["line"] == line_of(dataset, "planted")
        message = f"planted in {only.evaluate('index')}"
        detail = only.ask("exceptionInfo", {"threadId": only.stop["threadId"]})
        assert detail["description"] == message
        assert debugger.held() == [only]
        only.go()
        assert debugger.finish() != 0
        assert not debugger.left(5)
        start, *_, line = debugger.text.splitlines()
        assert start == "starting 2 rank(s) ..."
        assert line.endswith(f"error: {message}")  # perhaps after the progress bar
        assert "Traceback" not in debugger.text


@SAME_FOR_BOTH
def test_a_mistake_that_the_library_finds_is_held_in_main(
    project: Project, data: Path, tmp_path: Path
) -> None:
    """At the line that called the library, although F11 does not enter that."""
    change = "            run.divide_gradients(ddp_model)\n", ""
    folder = edited(project, tmp_path / "copy", change).folder
    with Debugger(folder) as debugger:
        debugger.launch(f5(folder, "--data", str(data), *small(data)))
        for rank in debugger.stopped():
            assert rank.stop["reason"] == "exception"
            assert rank.frame["line"] == line_of(folder / "main.py", "run.end_step()")
            detail = rank.ask("exceptionInfo", {"threadId": rank.stop["threadId"]})
            assert "call run.divide_gradients" in detail["description"]
        debugger.held()[0].go()  # the other rank ends with it
        assert debugger.finish() != 0
        assert not debugger.left(5)


@SAME_FOR_BOTH
def test_a_test_file(endless: Project) -> None:
    """The debugger stops in the test, and in the ranks that the test starts."""
    file = endless.folder / "tests" / "test_one.py"
    file.write_text(
        "from test_project import launch\n\n\n"
        "def test_one():\n    flags = ['--epochs', '1']\n    launch(2, *flags)\n"
    )
    places = {"tests/test_one.py": [{"line": 6}], **at(endless, "main.py", SUM)}
    with Debugger(endless.folder, places) as debugger:
        debugger.launch(configuration(endless.folder, "This test file", file=str(file)))
        (session,) = debugger.stopped(1)
        assert session.evaluate("flags[0]") == "'--epochs'"
        session.go()
        for number, rank in enumerate(debugger.stopped()):
            assert rank.evaluate("rank") == str(number)
        debugger.stop()
        assert not debugger.left(5)


def test_predict(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """On the open image, or on a folder in its place."""
    picture = next((data / "val").rglob("*.jpg"))
    file = picture if project.task == "classification" else picture.parent
    config = configuration(project.folder, "Predict: the open image", file=str(file))
    more = ["--checkpoint", str(trained / "best.pt"), "--output", str(tmp_path)]
    with Debugger(project.folder, at(project, "predict.py", "torch.inference_mode")) as debugger:
        debugger.launch({**config, "args": [*config["args"], *more]})
        (session,) = debugger.stopped(1)
        debugger.set({})
        session.go()
        assert debugger.finish() == 0
        assert not debugger.left(5)
    assert any(path.is_file() for path in tmp_path.rglob("*"))


@SAME_FOR_BOTH
def test_attach_to_ranks_of_two_nodes(project: Project, data: Path, tmp_path: Path) -> None:
    """--debug-rank: each listens on loopback, waits longer than the timeout, can be left again."""
    debug_port = free_port(2)
    env = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    more = ["--debug-rank", "1,0", "--debug-port", debug_port, "--dist-timeout", 3]
    command = [project.folder / "launch.sh", *flags(data, tmp_path, *more)]
    with Debugger(project.folder, at(project, "main.py", LOOP)) as debugger:
        mark = debugger.mark  # so that nothing is left, whatever fails here
        nodes = [start(command, mark, ranks=1, NODE_RANK=str(n), **env) for n in range(2)]
        lines = [node.stderr.readline() for node in nodes]
        time.sleep(4)
        for number, line in enumerate(lines):
            host, port = re.search(r"host (\S+), port (\d+)$", line).groups()
            assert (host, int(port)) == ("127.0.0.1", debug_port + number)
            assert listening(int(port)) == {"127.0.0.1"}
            debugger.attach(configuration(project.folder, "Attach to a rank", host=host, port=port))
        for number, rank in enumerate(debugger.stopped()):
            assert rank.threads()[0] == f"rank {number}"
            assert rank.evaluate("rank") == str(number)
            rank.disconnect()
        for node in nodes:
            out, err = node.communicate(timeout=120)
            assert (node.returncode, err) == (0, ""), out
        assert not debugger.left(5)
    assert (tmp_path / "last.pt").exists()


def listening(port: int) -> set[str]:
    """The IPv4 and IPv6 addresses at which anything listens on `port`."""
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            address, hexadecimal = line.split()[1].split(":")
            if int(hexadecimal, 16) == port and line.split()[3] == "0A":
                words = [address[i : i + 8] for i in range(0, len(address), 8)]
                found.add(socket.inet_ntop(family, b"".join(map(swap, words))))
    return found


def swap(word: str) -> bytes:
    return bytes.fromhex(word)[::-1]


@SAME_FOR_BOTH
def test_debug_rank_that_cannot_be(project: Project) -> None:
    project.alone("--debug-rank", "1").refused("--debug-rank 1", "0 to 0")
    project.alone("--debug-rank", "one").refused("--debug-rank", "one")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = project.alone("--debug-rank", 0, "--debug-port", port)
        done.refused(f"127.0.0.1:{port}", "--debug-port")


@SAME_FOR_BOTH
def test_without_a_debugger_nothing_of_it_is_there(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    more = [*flags(data, tmp_path), "--eval-only", "--resume", trained / "best.pt"]
    more += ["--dist-timeout", 77]
    done = project.alone(*more, script=SCRIPTS / "look_around.py").ok()
    *_, left, timeout = done.out.splitlines()
    assert left == "[] ['MainThread', 'watch']"
    assert timeout == "0:01:17"


@SAME_FOR_BOTH
def test_launcher_killed(project: Project, data: Path, tmp_path: Path) -> None:
    """Before the ranks have begun: none outlives a launcher that could not say goodbye."""
    mark = uuid.uuid4().hex
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif 'RANK' in os.environ: time.sleep(2)"
    )
    command = [project.folder / "launch.sh", *flags(data, tmp_path)]
    process = start(command, mark, PYTHONPATH=str(tmp_path))
    while len(processes(mark)) < 2:
        time.sleep(0.01)
    process.kill()
    done = finish(process, mark, timeout=5)
    assert not done.left
    assert done.err == ""


@SAME_FOR_BOTH
@pytest.mark.parametrize("seconds", [0.5, 3])
def test_interrupted_while_starting(project: Project, seconds: float) -> None:
    """Ctrl-C while torch is being imported, by the launcher or by the ranks."""
    mark = uuid.uuid4().hex
    process = start([project.folder / "launch.sh"], mark)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process, mark)
    assert done.status in (130, -signal.SIGINT)
    assert (done.err, done.left) == ("", [])
