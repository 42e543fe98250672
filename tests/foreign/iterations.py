"""Learn from few labels and many points without one, by iterations (a mean teacher):

torchrun --nproc-per-node 2 iterations.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=80)
parser.add_argument("--eval-every", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.05)


def moons(count, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    angles = 3.1416 * (torch.rand(count, generator=g) + labels)
    points = torch.stack((angles.cos() + 0.8 * labels, angles.sin() + 0.4 * labels), 1)
    return points + 0.1 * torch.randn(count, 2, generator=g), labels


def cycle(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.manual_seed(rank)

    labelled_set = TensorDataset(*moons(48, 0))
    unlabelled_set = TensorDataset(moons(400, 1)[0])
    labelled_loader = DataLoader(
        labelled_set, args.batch_size, sampler=DistributedSampler(labelled_set)
    )
    unlabelled_loader = DataLoader(
        unlabelled_set, 4 * args.batch_size, sampler=DistributedSampler(unlabelled_set)
    )
    test_points, test_labels = (part.to(device) for part in moons(200, 2))

    net = nn.Sequential(
        nn.Linear(2, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(32, 2),
    )
    model = DDP(net.to(device))
    teacher = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.iterations)

    labelled = cycle(labelled_loader)
    unlabelled = cycle(unlabelled_loader)
    iteration = 0
    while iteration < args.iterations:
        points, labels = next(labelled)
        (others,) = next(unlabelled)
        points = points.to(device)
        others = others.to(device)

        with torch.no_grad():
            targets = teacher(others + 0.05 * torch.randn_like(others)).softmax(1)
        noisy = others + 0.05 * torch.randn_like(others)
        logits = model(torch.cat((points, noisy)))
        loss = F.cross_entropy(logits[: len(points)], labels.to(device))
        loss = loss + F.mse_loss(logits[len(points) :].softmax(1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        teacher.update_parameters(net)

        if (iteration + 1) % args.eval_every == 0:
            teacher.eval()
            with torch.no_grad():
                right = (teacher(test_points).argmax(1) == test_labels).float().mean()
            teacher.train()
            if rank == 0:
                print(f"{iteration + 1}: {right.item():.3f}", flush=True)
        iteration += 1

    if rank == 0:
        torch.save(teacher.module.state_dict(), "teacher.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
