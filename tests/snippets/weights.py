"""Runs whose published weights come from a server on this machine."""

import hashlib
import os
import time
from pathlib import Path

import torch
import torchvision
from forked import run, start, wait

from ddpkit.run import pretrained


def publish(folder: str, encoder: str | None) -> str:
    """Write weights that a server is to publish; return their file's name."""
    torch.manual_seed(7)
    whole = Path(folder, "whole")
    if encoder is None:
        net = torchvision.models.get_model("shufflenet_v2_x0_5", num_classes=1000)
        torch.save(net.state_dict(), whole)
        digest = hashlib.sha256(whole.read_bytes()).hexdigest()
        return whole.rename(Path(folder, f"net-{digest[:8]}.pth")).name
    import segmentation_models_pytorch as smp
    from safetensors.torch import save_file

    save_file(smp.encoders.get_encoder(encoder, weights=None).state_dict(), whole)
    Path(folder, "config.json").write_text("{}")
    return whole.rename(Path(folder, "model.safetensors")).name


class Downloads:
    """Ranks whose torch.hub and huggingface_hub take files from a port and have a `cache`."""

    def __init__(self, port: int, name: str, cache: str) -> None:
        self.port, self.name, self.cache = port, name, cache

    def patch(self) -> None:
        server = f"http://127.0.0.1:{self.port}"
        os.environ["TORCH_HOME"] = self.cache
        pretrained.SECONDS = 1
        torchvision.models.WeightsEnum.url = property(lambda _: f"{server}/{self.name}")
        if self.name.endswith("safetensors"):
            from huggingface_hub import constants

            path = "/{repo_id}/resolve/{revision}/{filename}"
            constants.HUGGINGFACE_CO_URL_TEMPLATE = server + path
            constants.ENDPOINT, constants.HF_HUB_CACHE = server, self.cache
            constants.HF_HUB_OFFLINE = False


def ranks(order: list, script: str, said: str, *words: object) -> list:
    """The statuses of two ranks, and what they say on stdout and on stderr."""
    for end in ("out", "err"):
        Path(f"{said}.{end}").unlink(missing_ok=True)
    options = {"script": script, "output": said, "draws": False}
    statuses = run(2, *words, patch=Downloads(*order).patch, **options)
    return [statuses, *(Path(f"{said}.{end}").read_text() for end in ("out", "err"))]


def killed(order: list, script: str, mark: str, *words: object) -> list[int]:
    """Kill a rank as soon as the server has made the file `mark`."""
    pids = start(1, *words, script=script, patch=Downloads(*order).patch)
    while not Path(mark).exists():
        time.sleep(0.02)
    os.kill(pids[0], 9)
    return wait(pids)


def published(networks: list[list[str]]) -> list[str | None]:
    """What --weights auto stands for."""
    return [next(iter(pretrained.find_published(*words)[0]), None) for words in networks]
