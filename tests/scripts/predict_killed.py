"""predict.py until its second batch, and then no further."""

import os
import runpy
import signal

import torch

from ddpkit.data import loading

normalize, batches = loading.normalize, []


def last(images: torch.Tensor, *more: object) -> torch.Tensor:
    batches.append(images)
    if len(batches) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return normalize(images, *more)


loading.normalize = last
runpy.run_path("predict.py", run_name="__main__")
