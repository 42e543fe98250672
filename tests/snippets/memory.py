"""How much memory is taken, in kilobytes."""

import os
from argparse import Namespace

import torch

import ddpkit
import main
import model
from ddpkit.data import folders
from ddpkit.data.format import Format


def status(name: str, file: str = "/proc/self/status") -> int:
    with open(file) as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


class Loader(list):
    dataset = ()


def of_deterministic_metrics() -> int:
    """What the peak grows by while two pictures of 256 x 256 are evaluated for 21 classes."""
    main.distributed.setup(seed=0, deterministic=True)
    args = Namespace(tile=0, amp="off", loss="ce", label_smoothing=0.0, class_weights=None)
    shapes = ((3,), ())
    images, targets = (torch.zeros(2, *shape, 256, 256, dtype=torch.uint8) for shape in shapes)
    classes = [str(number) for number in range(21)]
    metrics = model.build_metrics(classes)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = status("VmHWM")
    criterion = ddpkit.criterion(model.build_criterion(args, [], classes))
    main.evaluate(torch.nn.Conv2d(3, 21, 1), Loader([(images, targets)]), criterion, metrics, args)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    return status("VmHWM") - before


def private() -> int:
    return status("Private_Dirty", "/proc/self/smaps_rollup")


def grown(samples: object) -> int:
    """What a forked worker's own memory grows by while it looks at each sample."""
    receive, send = os.pipe()
    if not os.fork():
        before = private()
        for index in range(len(samples)):
            _path, _mask = samples[index]
        os.write(send, str(private() - before).encode())
        os._exit(0)
    os.wait()
    return int(os.read(receive, 99))


def of_samples() -> list[int]:
    """Of 100,000 samples in a list, and as the project's dataset holds them."""
    samples = [(f"train/{number:050}.jpg", f"{number:050}.png") for number in range(100_000)]
    packed = folders.Files(folders.Part(samples, Format()), None).samples
    assert list(packed) == samples
    assert packed[-1] == samples[-1]
    return [grown(samples), grown(packed)]
