"""Training on device meta, whose tensors have no values: code that reads one fails there."""

import itertools
import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn

import ddpkit
import distributed
from ddpkit.data import loading

CPU, META = torch.device("cpu"), torch.device("meta")
STEPS = 2


def reading(main: Callable[[], object], root: Path) -> str:
    """Return which line of the files in `root` reads a value off the device in a step; "" if none.

    main: of main.py, which takes two optimizer steps with stand-ins, and writes nothing.
    """
    # What is read every so many steps may be read: no such step is one of these.
    far = math.lcm(*range(1, 101)) + 1
    run = MagicMock(epoch=0, began=0, step=far, loss=lambda loss_sum, count: loss_sum / 2)
    run.is_over.side_effect = [False, True]
    run.end_epoch.return_value = False

    def start(_: object, loader: Any, __: object, classes: Sequence[str], **parts: Any) -> object:
        batches = itertools.islice(loader, STEPS * parts["accumulate"])
        moved = (loading.move(each, META, loading.format_of(loader)) for each in batches)
        run.batches.return_value = enumerate(moved, parts["accumulate"] * far)
        run.classes = classes
        return run

    def wrap(model: nn.Module, *_: object, **__: object) -> nn.Module:
        vars(model)["no_sync"] = nullcontext
        return model

    stand_ins: dict[str, object] = {
        **{"Folder": lambda *_: MagicMock(state=None), "Run": start},
        **{"workers": lambda *_: loading.workers(0, CPU), "wrap": wrap},
    }
    distributed.setup(seed=0)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(distributed, "setup", lambda *_: META))
            for name, value in stand_ins.items():
                stack.enter_context(patch.object(ddpkit, name, value))
            for name in ("__repr__", "__format__"):  # which would read values if there were some
                stack.enter_context(patch.object(Tensor, name, refusing(getattr(Tensor, name))))
            main()
    except RuntimeError as error:
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line]
        own = [frame for frame in lines if Path(frame.filename).parent == root]
        if not own:
            raise
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line}"
        why = "reads a value off the device in each step, or has a size that depends on one"
        return f"{place}\n{why}: the device waits ({error})"
    finally:
        torch.distributed.destroy_process_group()
    assert run.end_step.call_count == STEPS
    return ""


def refusing(show: Callable[..., str]) -> Callable[..., str]:
    def shown(tensor: Tensor, *args: Any, **options: Any) -> str:
        if tensor.device == META:
            raise RuntimeError("a tensor is printed")
        return show(tensor, *args, **options)

    return shown
