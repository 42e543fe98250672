"""Train a small classifier with Lightning Fabric: torchrun --nproc-per-node 2 fabric_loop.py"""

import argparse

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """Noisy images of strokes, in ten directions."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = index % 10
        lines = torch.linspace(-1, 1, 16)
        angle = torch.tensor(label * 0.314)
        image = lines[:, None] * angle.cos() + lines * angle.sin()
        return (image.abs() < 0.2).float()[None] + 0.3 * torch.randn(1, 16, 16), label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 2)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, 2)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(144, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv2(x))
        return self.fc(self.dropout(x.flatten(1)))


def run(hparams):
    fabric = Fabric(accelerator="auto", devices=hparams.devices, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(hparams.seed)

    train_loader = DataLoader(
        Digits(640),
        batch_size=hparams.batch_size,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
    )
    test_loader = DataLoader(Digits(160), batch_size=hparams.batch_size)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=hparams.lr, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=hparams.gamma)

    for epoch in range(hparams.epochs):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            output = model(data)
            loss = F.cross_entropy(output, target)
            fabric.backward(loss)
            optimizer.step()
            if batch_idx % hparams.log_interval == 0:
                fabric.print(
                    f"epoch {epoch} [{batch_idx}/{len(train_loader)}] {loss.item():.4f}"
                )
        scheduler.step()

        model.eval()
        correct = torch.zeros((), device=fabric.device)
        with torch.no_grad():
            for data, target in test_loader:
                correct += (model(data).argmax(1) == target).sum()
        correct = fabric.all_reduce(correct, reduce_op="sum")
        fabric.print(
            f"epoch {epoch}  correct {int(correct)} of {len(test_loader.dataset)}"
        )

    if fabric.is_global_zero:
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    run(parser.parse_args())
