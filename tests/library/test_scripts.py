"""Scripts of other people, in foreign/: with their diffs they stop and resume exactly."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
from generated import ROOT, left, refusal, wait_for

import ddpkit
from ddpkit.data import samples
from ddpkit.run import resuming

FOREIGN = ROOT / "tests" / "foreign"
NAMES = sorted(path.stem for path in FOREIGN.glob("*.py"))
STEPS = {"gan": 128, "images": 64, "tokens": 60}
ENDED = re.compile("rank . lost another rank|Connection closed|reset by peer")


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[list[int], str, str]]:
    """Start an edited script on two ranks in a folder; return statuses and what was printed."""

    def act(
        name: str, out: str, patch: ranks.Patch = int, of_ranks: int = 2, **env: str
    ) -> tuple[list[int], str, str]:
        folder = tmp_path / out
        folder.mkdir(exist_ok=True)
        script = folder / f"{name}.py"
        if not script.exists():
            shutil.copy(FOREIGN / f"{name}.py", folder)
            diff = FOREIGN / f"{name}.diff"
            subprocess.run(["git", "apply", diff], cwd=folder, check=True)

        def begin() -> None:
            os.environ.update(env)
            # Neither that of the project is found, which other tests use.
            sys.path[:] = [place for place in sys.path if not has_main(place)]
            patch()

        output = folder / "printed"
        for path in folder.glob("printed.*"):
            path.unlink()
        pids = ranks.start(of_ranks, str(script), [], output, folder, begin)
        return ranks.wait(pids), *ranks.said(output)

    return act


def has_main(place: str) -> bool:
    return Path(place, "main.py").exists()


def at_step(step: int, signum: int, *which: int) -> ranks.Patch:
    """Have these ranks send themselves a signal at the end of a step."""

    def patch() -> None:
        end_step = resuming.end_step
        count = 0

        def patched() -> None:
            nonlocal count
            count += 1
            if count == step and int(os.environ["RANK"]) in which:
                os.kill(os.getpid(), signum)
            end_step()

        resuming.end_step = patched

    return patch


def parts(folder: Path) -> int:
    """A checksum of all that a run has saved."""
    state = torch.load(folder / "run" / "last.pt", weights_only=True)
    return samples.checksum([state["parts"], state["epoch"], state["step"]])


@pytest.mark.parametrize("name", NAMES)
def test_a_script_of_ones_own(
    name: str, tmp_path: Path, start: Callable[..., tuple[list[int], str, str]]
) -> None:
    """At most 15 lines; stopped by a signal to one rank, and killed: resumed to the same bits."""
    diff = (FOREIGN / f"{name}.diff").read_text()
    assert len(re.findall(r"^[+-](?![+-])", diff, re.MULTILINE)) <= 15
    assert start(name, "whole")[0] == [0, 0]
    stop = random.Random(name).randrange(2, STEPS[name] - 20)
    statuses, out, _ = start(name, "stopped", at_step(stop, signal.SIGTERM, 1))
    assert statuses == [75, 75]
    assert re.search(r"SIGTERM: stopped and saved at epoch \d+, step \d+", out)
    # Then killed, at most at the end of the next epoch.
    statuses, out, _ = start(name, "stopped", at_step(9, signal.SIGKILL, 0))
    assert statuses[0] == -9 and statuses[1]
    statuses, out, _ = start(name, "stopped")
    assert statuses == [0, 0]
    assert "epochs done" in out
    assert parts(tmp_path / "whole") == parts(tmp_path / "stopped")
    wait_for(lambda: not left(0), 30)  # plain loader workers of who was killed


HANG = """
import torch.distributed, datetime, functools
join = torch.distributed.init_process_group
short = functools.partial(join, timeout=datetime.timedelta(seconds=6))
torch.distributed.init_process_group = short
"""


def test_a_hang_of_a_script(
    start: Callable[..., tuple[list[int], str, str]], tmp_path: Path
) -> None:
    """A collective that one rank leaves out: where both are, and one line; then a fault."""
    folder = tmp_path / "hang"
    start("images", "hang", lambda: os._exit(0))  # only makes the folder
    script = folder / "images.py"
    code = script.read_text()
    line = "    dist.all_reduce(right)\n"
    assert code.count(line) == 1
    script.write_text(code.replace(line, f"    if dist.get_rank() == 0:\n    {line}"))
    statuses, _, err = start("images", "hang", lambda: exec(HANG, {}))
    assert statuses == [1, 1]
    assert re.search(r"rank 0, .*at images.py:\d+: in collective \d+, all_reduce", err)
    assert re.search(r"rank 1, .*at images.py:\d+", err)
    assert re.search(r"^error: rank \d timed out after 6 s", err, re.MULTILINE)
    fault = "    if dist.get_rank() == 1:\n        raise ddpkit.UserError('no such thing')\n"
    script.write_text(code.replace(line, fault + line))
    statuses, _, err = start("images", "hang")
    assert statuses == [2, 2]
    assert err.splitlines() == ["error: no such thing [images.evaluate]"]


def test_without_a_group(tmp_path: Path) -> None:
    """A notebook: parts are resumed, loaders give all samples, one rank is all."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    data = [(torch.full((2,), float(i)), i % 2) for i in range(10)]
    loader = ddpkit.train_loader(data, 4, workers=0)
    seen = []
    for turn in range(2):
        made = ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=optimizer)
        assert made.epoch == 2 * turn
        for epoch in made.epochs(2 + 2 * turn):
            for inputs, labels in made.steps(loader):
                seen.append((epoch, inputs[:, 0].tolist()))
                torch.nn.functional.cross_entropy(net(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert made.save_best(-epoch, is_higher=False)
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({str(numbers) for _, numbers in seen}) == 8  # each epoch in its order
    state = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert (state["best"], state["epoch"]) == (-3, 3)
    found = [
        label for _, labels in ddpkit.val_loader(data, 4, workers=0) for label in labels
    ]
    assert torch.stack(found).tolist() == [label for _, label in data]
    other = torch.optim.SGD(net.parameters(), 0.1)
    with refusal("checkpoint.fitting", "optimizer", "it was AdamW and is SGD"):
        ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=other)
