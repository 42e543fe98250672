"""A DDP training script in the manner of torchvision's references/classification, for training.py.

From there: datasets.ImageFolder, v1 transforms on PIL, DistributedSampler, SGD with momentum, and
`loss.item()` in each step, as its MetricLogger needs it. Beyond it, so that network and loader have
what ours have: channels last, the same scale range of crops, drop_last, workers that last, and on a
GPU TF32 and fused SGD.
Prints a line of JSON of the last epoch: images per second, and the share of time spent waiting for
images, the greatest of the ranks.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torchvision
from input import v1_transforms
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), required=True)
    for name in ("image-size", "batch-size", "workers", "threads", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    gpu = torch.accelerator.is_available()
    device = torch.device("cpu")
    if gpu:
        kind = torch.accelerator.current_accelerator().type
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(kind).set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group(dist.get_default_backend_for_device(device))

    dataset = torchvision.datasets.ImageFolder(
        os.path.join(args.data, "train"), v1_transforms(args.image_size)
    )
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(
        dataset,
        args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=gpu,
        drop_last=True,
        persistent_workers=args.workers > 0,
    )
    net = torchvision.models.get_model(args.arch, num_classes=len(dataset.classes)).to(
        device
    )
    model = DistributedDataParallel(
        net.to(memory_format=torch.channels_last), [device] if gpu else None
    )
    fused = True if gpu else None  # on CPUs that form takes twice the time
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=fused
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    dtype = torch.float16 if args.amp == "fp16" else torch.bfloat16
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        waited = 0.0
        began = time.monotonic()
        asked = began
        for images, targets in loader:
            images = images.to(device, non_blocking=True)
            images = images.contiguous(memory_format=torch.channels_last)
            targets = targets.to(device, non_blocking=True)
            waited += time.monotonic() - asked
            with torch.autocast(device.type, dtype, enabled=args.amp != "off"):
                loss = nn.functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            loss.item()
            asked = time.monotonic()
        seconds = time.monotonic() - began
    share = torch.tensor(waited / seconds, device=device)
    dist.all_reduce(share, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        images = len(loader) * args.batch_size * dist.get_world_size()
        print(json.dumps({"img_per_s": images / seconds, "data_wait": share.item()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
