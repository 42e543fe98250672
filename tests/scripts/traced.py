"""main.py, which notes its optimizer steps: traced.py FILE NET STOP FLAG...

FILE.<rank> gets a line per step: its number, learning rates, and checksums of the gradients and of
what the step has made of the weights. NET: "tiny" replaces the network by one that takes no time to
build. STOP: after that step of Adam all ranks get SIGKILL, as in "5:KILL", or the last one gets
another signal, as in "2:TERM"; ":" for none.
"""

import itertools
import os
import runpy
import signal
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import model

path, net, stop, *flags = sys.argv[1:]
last, _, name = stop.partition(":")
rank, ranks = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
steps = itertools.count(1)


class Tiny(nn.Module):
    """With BatchNorm and dropout: whatever can go astray. For labels of images or of pixels."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        first = nn.Conv2d(3, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.ReLU()
        then = nn.Dropout(0.2), nn.Conv2d(8, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU()
        self.encoder = nn.Sequential(*first, *then)
        self.decoder = nn.Conv2d(16, outputs, 1)
        self.is_of_pixels = Path("losses.py").exists()

    def forward(self, images: Tensor) -> Tensor:
        logits = self.decoder(self.encoder(images))
        if self.is_of_pixels:
            return nn.functional.interpolate(logits, images.shape[-2:])
        return logits.mean((2, 3))


def checksum(tensors: Iterable[Tensor | None]) -> str:
    """Of this rank's parts of `tensors`, whatever their order."""
    parts = [getattr(t, "_local_tensor", t).detach() for t in tensors if t is not None]
    return f"{sum(zlib.crc32(part.contiguous().numpy().tobytes()) for part in parts):x}"


def note(optimizer: Optimizer, *_: object) -> None:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    sums = checksum(weight.grad for weight in weights), checksum(weights)
    rates = sorted({group["lr"] for group in optimizer.param_groups})
    count = next(steps)  # in this process; Adam goes on where another one has stopped
    step = max((int(state.get("step", count)) for state in optimizer.state.values()), default=count)
    with open(f"{path}.{rank}", "a") as file:
        file.write(f"step {step}: lr {rates}, gradients {sums[0]}, weights {sums[1]}\n")
    if str(step) == last and (name == "KILL" or rank == ranks - 1):
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


register_optimizer_step_post_hook(note)
if net == "tiny":
    model.build_model = lambda args, classes, *_, **more: Tiny(len(classes))
sys.argv = ["main.py", *flags]
runpy.run_path("main.py", run_name="__main__")
