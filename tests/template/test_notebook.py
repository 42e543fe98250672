"""A notebook: one process without the launcher, cells within a loop of events, no `__file__`."""

from pathlib import Path

from generated import SMALL, Project, both_tasks

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


@both_tasks
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
