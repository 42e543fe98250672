"""Train a small CNN with DistributedDataParallel: torchrun --nproc-per-node 2 images.py"""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shapes(Dataset):
    """Noisy images of a square or a cross, at random places, sometimes flipped."""

    def __init__(self, count: int, train: bool) -> None:
        self.count = count
        self.train = train

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        g = torch.Generator().manual_seed(index if self.train else 10**6 + index)
        label = index % 2
        image = 0.3 * torch.randn(3, 32, 32, generator=g)
        x, y = torch.randint(0, 20, (2,), generator=g).tolist()
        image[:, y : y + 10, x : x + 10] += 1
        if label:
            image[:, y + 2 : y + 8, x + 2 : x + 8] -= 1
        if self.train:
            if random.random() < 0.5:
                image = image.flip(-1)
            image = image + 0.1 * torch.randn_like(image)
        return image, label


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, 2),
    )


def train_one_epoch(model, loader, criterion, optimizer, device):
    model.train()
    for images, labels in loader:
        images = images.to(device)
        labels = labels.to(device)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    right = torch.zeros(2, device=device)
    for images, labels in loader:
        predicted = model(images.to(device)).argmax(1).cpu()
        right[0] += (predicted == labels).sum()
        right[1] += len(labels)
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device(
        f"cuda:{rank % torch.cuda.device_count()}" if use_cuda else "cpu"
    )
    torch.manual_seed(0)

    train_set = Shapes(256, train=True)
    val_set = Shapes(64, train=False)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=train_sampler, num_workers=args.workers
    )
    val_loader = DataLoader(
        val_set, args.batch_size, sampler=DistributedSampler(val_set, shuffle=False)
    )

    model = DDP(build_model().to(device))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, criterion, optimizer, device)
        accuracy = evaluate(model.module, val_loader, device)
        scheduler.step()
        if rank == 0:
            print(
                f"epoch {epoch + 1}  loss {loss:.4f}  accuracy {accuracy:.4f}",
                flush=True,
            )
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
