"""Tests that test_gpu.py runs, on a machine with three made-up GPUs."""

import copy
import itertools
import math
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import emulate
import pytest
import torch
from generated import (
    Ranks,
    after_step,
    both_tasks,
    die,
    in_soak,
    refusal,
    rows,
    wait_for,
)
from ranks import draw_nothing, on_ranks
from torch import nn

import ddpkit
from ddpkit.ranks import distributed, process, protocol, replicas
from ddpkit.run import states
from ddpkit.run.loop import Run

SHORT = ["--image-size", 32, "--batch-size", 2]


def counts() -> Counter:
    """What was asked of the GPU by this process so far."""
    return Counter(emulate.counts())


def train_here(flags: list[object]) -> None:
    import main

    draw_nothing()
    sys.argv = ["main.py"]
    sys.argv += map(str, flags)
    ddpkit.run_main(main.main)


def repeated(loader: Any, times: int) -> Any:
    """A loader that has the batches of `loader` so many times."""
    batches = list(loader.raw()) * times
    found = copy.copy(loader)
    found.raw = lambda *_: iter(batches)
    return found


@on_ranks(2)
def test_what_travels_between_cpus(recwarn):
    """Objects, and tensors that are there, ask nothing of the GPU; a barrier asks the own one."""
    rank = distributed.rank()
    before = counts()
    assert distributed.gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert distributed.from_rank(1, bytes, 2**20) == bytes(2**20)
    assert distributed.reduce_tensor(torch.tensor(1)) == 2
    assert counts() == before
    distributed.barrier()
    assert torch.cuda.current_device() == rank
    assert not recwarn.list


@on_ranks(2)
def test_buffers_of_both_devices():
    """They travel between the CPUs; slices of a GPU, which nccl refuses, too."""
    network = nn.Module()
    rank = distributed.rank()
    for device in "cpu", "cuda":
        numbers = torch.arange(12.0, device=device).view(3, 4) + 100 * rank
        network.register_buffer(f"whole_{device}", numbers)
        network.register_buffer(f"sliced_{device}", numbers.clone()[:, ::2])
        network.register_buffer(f"flags_{device}", numbers < 50)
    before = counts()["collectives"]
    replicas.sync_networks([network])
    assert counts()["collectives"] == before
    sums = {"whole": 66, "sliced": 30, "flags": 12}
    for name, buffer in network.named_buffers():
        assert buffer.sum() == sums[name.split("_")[0]], name


@both_tasks
@on_ranks(1, group=False)
def test_no_step_and_no_batch_waits_for_the_gpu(project, few, tmp_path):
    """Two copies a step, three a batch, of pinned memory, and one back if the step is logged.

    DDP waits in its first 10 steps only.
    """
    import main

    steps = []
    evaluations = []
    own_step = Run.end_step
    own_evaluate = main.evaluate

    def end_step(self: Run, *numbers: Any) -> None:
        self.checked_at = math.inf  # every few seconds it reads the loss
        own_step(self, *numbers)
        steps.append(counts())

    def evaluate(model: Any, loader: Any, *more: Any) -> Any:
        # the first time metrics are grouped
        result = own_evaluate(model, loader, *more)
        if not isinstance(loader.batch_sampler, list):  # a first batch, to try it
            for times in 1, 11:
                again = repeated(loader, times)
                before = counts()
                own_evaluate(model, again, *more)
                evaluations.append(counts() - before)
        return result

    Run.end_step = end_step
    main.evaluate = evaluate
    recipe = {
        "classification": "--ema 0.9",
        "segmentation": "--amp fp16 --optimizer sgd --clip-grad-norm 1",
    }[project.task]
    flags = project.flags(few, tmp_path, "--log-every", 1)
    train_here(flags + SHORT + recipe.split())
    passes = 3 * 10  # batches of 6 images
    asked = evaluations[1] - evaluations[0]
    waits = asked.pop("stream_waits")  # in torchmetrics' confusion matrix
    # A collective waits or not, as fast as it is; there are a few in each evaluation.
    expected = {"classification": 1, "segmentation": 3}
    assert round(waits / passes) == expected[project.task]
    each = [
        (later - earlier, 2, 1) for earlier, later in itertools.pairwise(steps[-3:])
    ]
    each.append((asked, 3 * passes, 0))
    for found, copies, back in each:
        assert found.pop("h2d") == copies
        assert found.pop("d2h", 0) == back
        # torch asks for more memory now and then, and keeps it
        assert found.pop("mallocs", 0) <= 3, found
        assert found.keys() <= {"h2d_bytes", "collectives"}
    assert counts()["kernels"] == 0  # which would have computed nothing


@on_ranks(2, group=False)
def test_checkpoints_and_peaks_of_a_gpu(project, few, tmp_path):
    """Rank 0 copies each tensor once for both files; any machine can load them."""
    saves = []
    take_states = states.take_states

    def counted(parts: dict) -> dict:
        whole = [part.state_dict() for part in parts.values()]
        leaves = torch.utils._pytree.tree_leaves(whole)
        there = {leaf.data_ptr() for leaf in leaves if getattr(leaf, "is_cuda", False)}
        before = counts()
        copied = take_states(parts)
        saves.append((counts() - before, len(there)))
        return copied

    states.take_states = counted
    after_step(1, lambda: torch.empty(2**24, dtype=torch.uint8, device="cuda"))()
    train_here(project.flags(few, tmp_path, "--epochs", 2))
    if distributed.rank():
        return
    # before and after each evaluation, and in the second step, to try
    assert len(saves) == 5
    for asked, tensors in saves:
        assert asked.pop("d2h") == tensors > 400
        assert asked.keys() <= {"stream_waits", "device_waits"}
    for name in "last.pt", "best.pt":
        weights = torch.load(tmp_path / name, weights_only=True)["model"]
        assert {each.device.type for each in weights.values()} == {"cpu"}
        assert weights["conv1.0.weight"].is_contiguous(
            memory_format=torch.channels_last
        )
    peaks = [float(row["peak_memory"]) for row in rows(tmp_path)]  # GiB
    assert 0.1 > peaks[0] > peaks[1] + 2**-7 > 2**-7 + 0.001  # which is counted anew


@pytest.mark.soak
def test_stopped_and_resumed(project, few, tmp_path):
    """With three ranks, SIGTERM in mid-epoch: the bits are those of a run that nothing stopped."""
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"

    def start(out: Path, *more: object) -> Ranks:
        words = project.flags(few, out, more) + SHORT
        words += ["--accumulate", 2, "--clip-grad-norm", 1, "--epochs", 2]
        return project.start(words, on=3)

    start(whole).end().ok()
    run = start(stopped, "--save-every", 1)
    wait_for((stopped / "last.pt").exists)
    run.kill(signal.SIGTERM)
    done = run.end()
    assert done.statuses == [75] * 3, done.err
    assert done.left == [], done.err
    assert "3 rank(s) on Fake GPU 0" in done.out
    at_stop = torch.load(stopped / "last.pt", weights_only=True)["step"]
    start(stopped).end().ok()
    one = torch.load(whole / "last.pt", weights_only=True)
    other = torch.load(stopped / "last.pt", weights_only=True)
    assert 0 < at_stop < one["step"] == other["step"]
    for name, value in one["model"].items():
        assert torch.equal(value, other["model"][name]), name


def test_out_of_memory(project, few, tmp_path):
    """In one line, among ranks of nccl."""

    def ask() -> None:
        torch.empty(2**35, dtype=torch.uint8, device="cuda")

    done = project.train(few, tmp_path / "out", patch=after_step(2, ask, 1))
    asked = "Tried to allocate 32.00 GiB"
    done.refused("failures.of_memory", "rank 1 ", asked)


def wait_alone() -> None:
    distributed.reduce_tensor(torch.ones(3, device="cuda"))


@pytest.mark.parametrize(
    ("act", "by_default", "cause"),
    [
        (wait_alone, True, ""),
        in_soak(die, False, r": rank 1 has ended \(process \d+\)"),
    ],
)
def test_ranks_that_wait(project, few, tmp_path, act, by_default, cause):
    """nccl's ranks hang: a block says where, then one line, before torch's watchdog has a turn."""

    def patch() -> None:
        if not by_default:  # the backend of torch before 2.15
            os.environ["TORCH_DIST_USE_NCCL2"] = "0"
        process.project = lambda: project.folder
        after_step(2, act, 1)()

    done = project.train(
        few, tmp_path / "out", SHORT, "--dist-timeout", 8, on=3, patch=patch
    )
    of_rank_1 = -signal.SIGKILL if act is die else 1
    assert done.statuses == [1, of_rank_1, 1], done.err
    assert done.left == [], done.err
    where = r"^rank{}, epoch 1, step [23], .*: in collective \d+, all_reduce \("
    for ranks in ("s 0, 2",) if act is die else (" 1", "s 0, 2"):
        assert re.search(where.format(ranks), done.err, re.M), done.err
    ended = r"^error: rank \d timed out after 8 s \(--dist-timeout\) waiting for another rank"
    assert len(re.findall(f"{ended}{cause}$", done.err, re.M)) == 1, done.err
    assert "atchdog" not in done.err


@on_ranks(4, group=False)
def test_more_ranks_than_gpus(tmp_path):
    os.environ[protocol.STORE] = str(tmp_path / "store")  # which stays when rank 0 ends
    with refusal("devices.check", "4 ranks on", "3 GPU(s)", "NPROC=3"):
        distributed.rendezvous(timeout=60)


@pytest.mark.soak
def test_gpus_and_cpus(project, few, tmp_path):
    """Two GPUs learn, and find, what two CPUs do."""

    def hide_gpus() -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

    found = []
    for folder, patch in (tmp_path / "gpus", None), (tmp_path / "cpus", hide_gpus):
        done = project.train(few, folder, SHORT, "--amp", "off", patch=patch).ok()
        assert ("2 rank(s) on Fake GPU 0" in done.out) == (patch is None)
        row = rows(folder)[0]
        model = torch.load(folder / "last.pt", weights_only=True)["model"]
        weights = torch.cat([each.flatten() for each in model.values()]).double()
        losses = [float(row[name]) for name in ("train_loss", "val_loss")]
        found.append((losses[0], losses[1], float(weights.norm())))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
