"""A training step: that nothing waits; half precision; compiled."""

import importlib.util
import inspect
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from digest import digest
from generated import ROOT, TEMPLATE_FOLDER, Project, after_step, die, rows, run
from ranks import on_ranks
from torch import nn

from ddpkit.run import loop as loops


def test_nothing_waits_in_a_step(project: Project, data: Path, tmp_path: Path) -> None:
    """No collective but the gradients', once a step; no number is read off the device."""
    profile = torch.profiler.profile()

    def profiled() -> None:
        loops.SECONDS_BETWEEN_CHECKS = math.inf  # the loss is read by time
        after_step(2, profile.start)()
        after_step(5, stop)()

    def stop() -> None:
        profile.stop()
        counts = {event.key: event.count for event in profile.key_averages()}
        (tmp_path / f"rank{torch.distributed.get_rank()}.json").write_text(
            json.dumps(counts)
        )

    sums = set()
    for accumulate, batch_size in (1, 4), (2, 2):
        # AdamW reads its count of steps, and augmentation its random numbers, which lie
        # on the CPU.
        words = [
            "--clip-grad-norm",
            1,
            "--optimizer",
            "sgd",
            "--image-size",
            32,
            "--workers",
            1,
        ]
        words += ["--accumulate", accumulate, "--batch-size", batch_size]
        project.train(data, tmp_path / str(accumulate), words, patch=profiled).ok()
        for rank in (0, 1):
            counts = json.loads((tmp_path / f"rank{rank}.json").read_text())
            assert counts["DistributedDataParallel.forward"] == 3 * accumulate
            collectives = {
                name: n for name, n in counts.items() if name.startswith("c10d::")
            }
            assert collectives.keys() == {"c10d::allreduce_"}
            sums.add(collectives["c10d::allreduce_"])
            assert (
                not {"aten::_local_scalar_dense", "aten::item", "aten::nonzero"}
                & counts.keys()
            )
    assert len(sums) == 1  # the buckets of the gradients, whatever is accumulated


@on_ranks(1, group=False)
def test_the_projects_own_test_of_a_step(
    project: Project, few: Path, tmp_path: Path
) -> None:
    """It finds what would make the device wait, and names the line; now and then is allowed."""
    sys.path.insert(0, "tests")
    import test_project

    import main

    code = main.train_one_epoch.__code__
    source = "\n" * (code.co_firstlineno - 1) + inspect.getsource(main.train_one_epoch)
    line = "losses.append(loss.detach())"

    def check(planted: str) -> None:
        changed = source.replace(line, f"{planted}; {line}")
        exec(compile(changed, code.co_filename, "exec"), vars(main))
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        with pytest.MonkeyPatch.context() as patch:
            test_project.test_a_step_reads_nothing_off_the_device(few, folder, patch)

    now_and_then = "run.step % 5 == 0 and loss.item()"
    check(
        f"{now_and_then}; run.is_logged and print(loss); run.writer.add_scalar('a', 1.0)"
    )
    for planted in "print(f'{loss:.3f}')", "run.writer.add_scalar('a', loss.detach())":
        with pytest.raises(
            pytest.fail.Exception, match=r"^main.py:\d+: losses\.append\(loss"
        ):
            check(planted)


MAIN = """
import torch
from torch.nn.parallel import DistributedDataParallel

def main(words):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    loader = torch.utils.data.DataLoader([(torch.ones(4), 1)] * 16, 2)
    net = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step, (inputs, targets) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        PLANTED
        loss.backward()
        optimizer.step()
    print(loss.item())
    torch.distributed.destroy_process_group()
"""
NOW_AND_THEN = """step % 5 == 0 and loss.item()
step % 2 == 0 and print(loss)
step % 5 == 0 and targets.nonzero()
loss.to('cpu', non_blocking=True)
loss.to(torch.device('cpu'))
inputs[targets]
inputs.masked_fill(inputs > 3, 0.0)
torch.distributed.all_reduce(loss.detach())"""
IN_EACH_STEP = """loss.item()
print(loss)
str(loss)
f'{loss:.3f}'
1 if loss > 3 else 2
loss.cpu()
loss.to('cpu')
targets.tolist()
loss.detach().numpy()
targets.nonzero()
targets.unique()
inputs[inputs > 0]
loss.register_hook(print)"""


@on_ranks(1, group=False)
def test_lines_that_wait(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / TEMPLATE_FOLDER / "tests"))
    import stalls

    def find(number: int, planted: str) -> str:
        path = tmp_path / f"main{number}.py"
        path.write_text(MAIN.replace("PLANTED", planted))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        main = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(main)
        return stalls.find(main, [])

    assert find(0, "; ".join(NOW_AND_THEN.split("\n"))) == ""
    for number, line in enumerate(IN_EACH_STEP.split("\n"), 1):
        at, text = (14, "loss.backward()") if "hook" in line else (13, line)
        assert find(number, line).startswith(f"main{number}.py:{at}: {text}\n")
    with pytest.raises(ValueError, match="6 are needed"):
        find(99, "return torch.distributed.destroy_process_group()")


def test_half_precision(project: Project, data: Path, tmp_path: Path) -> None:
    """fp16 skips steps until its scale fits, resumes with that scale, and does not go astray."""
    words = [
        "--arch",
        "squeezenet1_1",
        "--image-size",
        32,
        "--optimizer",
        "sgd",
        "--lr",
        0.01,
    ]
    killed = after_step(4, die)
    found = {}
    for name, kind in (
        ("whole", "fp16"),
        ("stop", "fp16"),
        ("bf16", "bf16"),
        ("off", "off"),
    ):
        out = tmp_path / name
        more = ["--amp", kind, "--save-every", 1]
        if name == "stop":
            first = project.train(data, out, words, more, patch=killed)
            assert first.statuses == [-9, -9]
        project.train(data, out, words, more).ok()
        found[name] = digest(out)
    assert found["whole"] == found["stop"]
    assert len({*found.values()}) == 3
    state = torch.load(tmp_path / "whole" / "last.pt", weights_only=True)
    assert state["scaler"]["scale"] < 2**16
    assert float(rows(tmp_path / "whole")[0]["train_loss"]) < 2


def test_compiled(project: Project, few: Path, tmp_path: Path) -> None:
    """Its checkpoints fit an uncompiled network."""

    def tiny() -> None:
        import model

        ends = [
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 6),
        ]
        model.build_model = lambda *_: nn.Sequential(nn.Conv2d(3, 8, 3, 4), *ends)

    def counting() -> None:
        from torch._dynamo.utils import counters

        tiny()
        compiled = nn.Module.compile
        nn.Module.compile = lambda self: compiled(self, backend="aot_eager")  # no C++
        after_step(3, lambda: print("graphs:", counters["stats"]["unique_graphs"]))()

    done = project.train(few, tmp_path, "--compile", on=1, patch=counting).ok()
    assert "graphs: 1\n" in done.out
    assert (
        "1 of 2 epochs done"
        in project.train(few, tmp_path, "--epochs", 2, patch=tiny).ok().out
    )


NOT_FORKED = """
import multiprocessing, sys

def main(source):
    multiprocessing.set_start_method("forkserver")
    import torch
    import dataset, ddp, ddpkit
    from ddpkit.data import loading
    from flags import parse_args

    loading.worker_context = lambda workers: None  # Python's default, on Linux too
    args = parse_args(["--data", source, "--image-size", "32", "--seed", "3"])
    ddp.setup(0, args)
    train, _, classes = dataset.build_datasets(args)
    found = []
    for workers in 0, 1:
        how = {"classes": classes, "seed": 3, "workers": workers}
        found.append(list(ddpkit.train_loader(train, 4, **how)))
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_workers_that_are_not_forked(
    project: Project, few: Path, tmp_path: Path
) -> None:
    """Under forkserver, the default of Python 3.14."""
    script = tmp_path / "script.py"
    script.write_text(NOT_FORKED)
    command = [sys.executable, script, few]
    run(command, cwd=project.folder, PYTHONPATH=str(project.folder)).ok()
