"""Trains as main.py does, on a made-up GPU; the first word says what else.

copies: prints, as JSON, what each save asks of the GPU. limit=BYTES: so large is the GPU.
step, evaluation: rank 1 asks for too much in the second step, or rank 0 in the evaluation.
"""

import json
import os
import sys
from typing import Any

import emulate
import torch

import main
from engine.data import loading
from engine.ranks import distributed, failures, remedies
from engine.run import transfer
from engine.run.progress import Run

word = sys.argv.pop(1)
to_host, end_step, infer = transfer.to_host, Run.end_step, main.infer


def counted(state: dict) -> dict:
    before = emulate.counts()
    copied = to_host(state)
    asked = {name: n - before[name] for name, n in emulate.counts().items() if n != before[name]}
    storages = {each.untyped_storage().data_ptr() for each in tensors(state) if each.is_cuda}
    print(json.dumps({"asked": asked, "storages": len(storages), "seen": len(tensors(copied))}))
    return copied


def tensors(state: dict) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(state)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def greedy_step(self: Run) -> None:
    end_step(self)
    if distributed.rank() == 1:
        torch.empty(2**35, dtype=torch.uint8, device=self.totals.loss.device)


def greedy_infer(*args: Any, **kwargs: Any) -> Any:
    torch.empty(2**35, dtype=torch.uint8, device="cuda")
    return infer(*args, **kwargs)


if word == "copies":
    transfer.to_host = counted
elif word == "step":
    Run.end_step = greedy_step
elif word == "evaluation":
    main.infer = greedy_infer
else:
    os.environ["FAKE_GPU_BYTES"] = word.removeprefix("limit=")
with failures.one_line_errors(loading.explain, remedies.explain):
    main.main()
