"""Regression of a table, which stops early: torchrun --nproc-per-node 2 early_stopping.py"""

import argparse
import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--patience", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.03)


def table(rows, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=g)
    y = x[:, 0] * x[:, 1] + x[:, 2].abs() + 0.5 * torch.randn(rows, generator=g)
    return x, y


def main():
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.manual_seed(0)

    x, y = (part.to(device) for part in table(256, 0))
    val_x, val_y = (part.to(device) for part in table(128, 1))
    net = nn.Sequential(
        nn.Linear(6, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
    )
    model = DDP(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    stop = SimpleNamespace(best=float("inf"), bad=0, losses=[], weights=None)
    for epoch in range(args.epochs):
        model.train()
        order = torch.randperm(len(x))  # the same on all ranks
        for rows in order[rank::world_size].split(args.batch_size):
            loss = F.mse_loss(model(x[rows])[:, 0], y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            val_loss = F.mse_loss(net(val_x)[:, 0], val_y)
        dist.broadcast(val_loss, 0)
        plateau.step(val_loss.item())
        stop.losses.append(val_loss.item())
        if val_loss.item() < stop.best:
            stop.best = val_loss.item()
            stop.bad = 0
            stop.weights = copy.deepcopy(net.state_dict())
        else:
            stop.bad += 1
        if rank == 0:
            print(
                f"epoch {epoch}: {val_loss.item():.4f}, best {stop.best:.4f}",
                flush=True,
            )
        if stop.bad >= args.patience:
            break

    net.load_state_dict(stop.weights)
    if rank == 0:
        torch.save({"model": net.state_dict(), "losses": stop.losses}, "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
