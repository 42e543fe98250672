"""ddpkit.replay: a step of a run again, as it was, and without a trace."""

import json
import sys
from pathlib import Path

import pytest
from dap import Debugger, configuration, line_of
from ports import free_port
from running import NET, SAME_FOR_BOTH, Project

from ddpkit import replay
from ddpkit.errors import UserError

REPLAY = "ddpkit/replay.py"
BODY = "images, targets = transform_batch("  # the first line of the training loop's body


@SAME_FOR_BOTH
def test_it_is_the_same_step(project: Project, data: Path, tmp_path: Path) -> None:
    """To the bit, with dropout, BatchNorm, AMP, an average, and a schedule, on two ranks."""
    words = [*NET, "--epochs", 2, "--save-every", 4, "--ema", 0.9, "--amp", "fp16"]
    found = project.call("replaying.exactly", data, tmp_path, *words)
    for step, first in ("2:5", "2:3"), ("1:3", "1:1"):
        for rank, (then, now) in enumerate(zip(found["whole"], found[step], strict=True)):
            (stop,) = now["stops"]
            i = int(step[-1]) - 1
            assert stop == [step, i, *then["passes"][step]], rank
            assert [*now["passes"]] == [f"{first[0]}:{n}" for n in range(int(first[-1]), i + 2)]
            assert all(then["passes"][name] == value for name, value in now["passes"].items())
            assert now["totals"][step] == then["totals"][step]  # what the forward pass made of it
    assert found["whole"][0]["passes"]["2:5"] != found["whole"][1]["passes"]["2:5"]
    assert "from " in found["said"]["2:5"] and "last-1.pt" in found["said"]["2:5"]
    assert "from the start of the run" in found["said"]["1:3"]
    assert "train_loss" not in found["said"]["1:3"]
    assert found["late"][0] == 2
    assert found["late"][1] == "error: the run has 2 epoch(s) of 6 step(s)\n"
    assert found["is_unchanged"]


@SAME_FOR_BOTH
def test_on_one_process(project: Project, data: Path, tmp_path: Path) -> None:
    """The same images, from a checkpoint two steps before; the weights differ by rounding."""
    words = [*NET, "--arch", "squeezenet1_1", "--epochs", 1]  # which has no BatchNorm
    words += ["--optimizer", "sgd", "--lr", 0.01, "--save-every", 2]
    found = project.call("replaying.on_one_process", data, tmp_path, *words)
    now = found["again"]["passes"]
    assert [*now] == ["1:5", "1:6"]
    assert [stop[:2] for stop in found["again"]["stops"]] == [["1:6", 10]]  # its first pass
    for step, passes in now.items():
        images = sorted(image for each in passes for image in each["images"])
        whole = [image for rank in found["whole"] for image in rank["passes"][step][0]["images"]]
        assert len(passes) == 2
        assert images == sorted(whole)
    assert 0 < found["apart"] < 1e-3 * found["moved"]


@SAME_FOR_BOTH
def test_a_loss_that_is_no_number(project: Project, data: Path, tmp_path: Path) -> None:
    """It was noticed late: the replay of that step names the first one, and what to type."""
    found = project.call("replaying.no_number", data, tmp_path, *NET, "--epochs", 1)
    assert 2 in found["statuses"] and 0 not in found["statuses"]
    assert "became NaN or inf at epoch 1, step 6: " in found["error"]
    assert f"replay 1:6 --output-dir {tmp_path}/run --debug-rank" in found["error"]
    assert "the loss of rank 1 became NaN or inf at epoch 1, step 3: " in found["earlier"]
    assert f"replay 1:3 --output-dir {tmp_path}/run --debug-rank 1" in found["earlier"]
    assert found["last"] == found["earlier"]
    for then, now in zip(found["whole"], found["found"], strict=True):
        assert now["stops"] == [["1:3", 2, *then["passes"]["1:3"]]]
        assert now["stops"][0][2]["finite"] and not then["passes"]["1:4"][0]["finite"]


@SAME_FOR_BOTH
def test_what_cannot_be_replayed(project: Project, trained: Path, tmp_path: Path) -> None:
    run = ["--output-dir", trained]
    for value in "0:0", "1:0", "abc", "3", "1:2:3", "--lr":
        project.alone(value, *run, script=REPLAY).refused("EPOCH:STEP")
    project.alone("1:1", *run, "--eval-only", script=REPLAY).refused("--eval-only")
    project.alone("1:1", *run, "--lrr", 1, script=REPLAY).refused("--lrr", "main.py --help")
    project.alone("1:1", "--output-dir", tmp_path, script=REPLAY).refused("args.json", "No such")
    project.alone("1:1", *run, script=REPLAY).refused("no debugger", "F5", "--debug-rank")
    project.fork("1:1", *run, script=REPLAY).refused("no debugger", "F5", "--debug-rank")


@pytest.mark.parametrize("text", ["{", "[]", '{"flags": {"lr": 0.1}}'])
def test_an_args_json_that_is_none(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "args.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["replay", "1:1", "--output-dir", str(tmp_path)])
    with pytest.raises(UserError, match=r"args\.json: cannot be read .*--output-dir"):
        replay.read_flags()


def test_on_another_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More passes on fewer ranks: each has the images that a pass of a rank had."""
    monkeypatch.setattr(sys, "argv", ["replay", "2:7", "--output-dir", str(tmp_path), "--lr", "1"])
    monkeypatch.setattr(replay, "overrides", given := {})
    flags = {"accumulate": 3, "batch_size": 12, "output_dir": "elsewhere"}
    (tmp_path / "args.json").write_text(json.dumps({"flags": flags, "ranks": 4}))
    for ranks, accumulate in (4, 3), (2, 6), (1, 12), (6, 2):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        own = ["--lr", "1", "--output-dir", str(tmp_path)]
        assert replay.read_flags() == ((2, 7), own)
        assert given == {"accumulate": accumulate, "batch_size": 12}
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(UserError, match="5 ranks cannot share a step of 4: use 4 or one"):
        replay.read_flags()


@SAME_FOR_BOTH
def test_f5(project: Project, trained: Path) -> None:
    """Both ranks stop in main.py, with the batch at hand, and can be stepped through the step."""
    answers = {"run": str(trained), "step": "1:3"}
    with Debugger(project.folder) as debugger:
        debugger.launch(configuration(project.folder, "DDP: replay a step", **answers))
        for number, rank in enumerate(debugger.stopped()):
            assert rank.frame["name"] == "train_one_epoch"
            assert rank.frame["line"] == line_of(project.folder / "main.py", BODY)
            assert rank.evaluate("(rank, run.epoch, i)") == f"({number}, 0, 2)"
            assert rank.evaluate("(*images.shape,)") == "(4, 3, 64, 64)"
            rank.go()
        assert debugger.finish() == 0
        assert "epoch 1, step 3 is over; nothing was saved" in debugger.text
        assert not debugger.left(5)


@SAME_FOR_BOTH
def test_one_rank_of_two(project: Project, trained: Path) -> None:
    """What the message of a NaN says to type: the other rank waits, and does not stop."""
    port = free_port(2)
    words = ["./launch.sh", "-m", "ddpkit.replay", "1:3", "--output-dir", str(trained)]
    words += ["--debug-rank", "1", "--debug-port", str(port)]
    with Debugger(project.folder) as debugger:
        env = {"NPROC": "2", "PYTHON": sys.executable}
        debugger.type(words, project.folder, env)
        debugger.wait(lambda: "waits for a debugger" in debugger.text, "rank 1")
        where = {"host": "127.0.0.1", "port": str(port + 1)}
        debugger.attach(configuration(project.folder, "Attach to a rank", **where))
        (rank,) = debugger.stopped(1)
        assert rank.frame["line"] == line_of(project.folder / "main.py", BODY)
        assert rank.evaluate("(rank, run.epoch, i)") == "(1, 0, 2)"
        rank.go()
        assert debugger.finish() == 0
        assert "epoch 1, step 3 is over; nothing was saved" in debugger.text
        assert not debugger.left(5)
