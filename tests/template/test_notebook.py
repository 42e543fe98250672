"""main() several times in a process: in a notebook, in a loop of events; on ranks."""

from pathlib import Path

import pytest
import torch
from generated import SMALL, Project, both_but_one_in_soak

CELLS = """
import asyncio, json, signal, sys
from pathlib import Path

del __file__  # a kernel's __main__ has none
data, out, *flags = sys.argv[1:]
flags = ["--data", data, "--output-dir", out, *flags]


async def cells():
    import main
    import torch
    from dataset import build_datasets
    from flags import parse_args
    from model import build_model

    import ddpkit

    args = parse_args(flags)
    train_set, _, classes = build_datasets(args)
    image, target = train_set[0]
    net = build_model(args, classes, len(image)).eval()
    assert net(image[None].float()).shape[:2] == (1, len(classes))
    before = signal.getsignal(signal.SIGINT)
    main.main(flags)
    main.main([*flags, "--epochs", "2"])  # goes on
    end_step = ddpkit.Run.end_step

    def end_interrupted(*words):
        signal.raise_signal(signal.SIGINT)
        end_step(*words)

    ddpkit.Run.end_step = end_interrupted
    for _ in range(2):
        try:
            main.main([*flags, "--epochs", "99"])
        except KeyboardInterrupt:
            print("interrupted")
    ddpkit.Run.end_step = end_step
    main.main([*flags, "--eval-only", "--json"])
    try:
        main.main([*flags, "--wrong", "1"])
    except ddpkit.UserError as error:
        assert "--wrong: no such flag" in str(error)
    else:
        raise AssertionError("--wrong")
    best = ddpkit.open_model(f"{out}/best.pt", build_model, parse_args, torch.device("cpu"))
    assert list(best[1]) == list(classes)
    await asyncio.sleep(0)  # the kernel is as it was
    print("alive", signal.getsignal(signal.SIGINT) == before)


asyncio.run(cells())
"""


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
def test_cells(project: Project, few: Path, tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    script.write_text(CELLS)
    words = [few, tmp_path / "out", *SMALL[project.task]]
    done = project.run(words, script=script, on=1).ok()
    assert "1 of 2 epochs done" in done.out
    assert '{"val_loss"' in done.out
    assert done.out.count("epoch 1/") == done.out.count("epoch 2/2") == 1
    assert done.out.count("\nSIGINT: stopped and saved at epoch") == 2
    assert done.out.count("\ninterrupted\n") == 2
    assert done.out.endswith("\nalive True\n")


FOLDS = """
import sys, time
import ddpkit, main, torch
from ddpkit.ranks import distributed

data, out, *flags = sys.argv[1:]


def folds():
    for part in 1, 2, 3, 4:
        main.main([*flags, "--data", data, "--output-dir", f"{out}/{part}", "--fold", f"{part}/4"])
        if part in (2, 3):  # as at the end of many scripts
            torch.distributed.destroy_process_group()
            time.sleep(1 - distributed.rank())  # the others find nothing of it
    print("rank", distributed.rank(), "of", torch.distributed.get_world_size())


ddpkit.run_main(folds)
"""


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
def test_folds_in_one_process(project: Project, few: Path, tmp_path: Path) -> None:
    """They keep the group of ranks that they have, and end with the bits of a run of its own."""
    script = tmp_path / "folds.py"
    script.write_text(FOLDS)
    words = [few, tmp_path, *SMALL[project.task]]
    done = project.run(words, script=script, on=2).ok()
    assert [f"rank {rank} of 2" in done.out for rank in range(2)] == [True, True]
    project.train(few, tmp_path / "own", "--fold", "4/4").ok()
    own, fold = (
        torch.load(tmp_path / name / "last.pt", weights_only=True)["model"]
        for name in ("own", "4")
    )
    assert all(torch.equal(own[name], fold[name]) for name in own)
