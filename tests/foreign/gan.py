"""A small GAN on rings of points: torchrun --nproc-per-node 2 gan.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--niter", type=int, default=4, help="number of epochs")
parser.add_argument("--batchSize", type=int, default=32)
parser.add_argument("--nz", type=int, default=8, help="size of the latent vector")
parser.add_argument("--lr", type=float, default=0.0002)


def rings(count):
    g = torch.Generator().manual_seed(0)
    angles = torch.rand(count, generator=g) * 6.2832
    radii = torch.randint(1, 3, (count,), generator=g)
    return torch.stack((radii * angles.cos(), radii * angles.sin()), 1)


def main():
    opt = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = (
        torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(rank)

    dataset = TensorDataset(rings(1024))
    sampler = DistributedSampler(dataset, drop_last=True)
    dataloader = DataLoader(dataset, opt.batchSize, sampler=sampler, drop_last=True)

    netG = nn.Sequential(
        nn.Linear(opt.nz, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)
    )
    netD = nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1)
    )
    netG = DDP(netG.to(device))
    netD = DDP(netD.to(device), broadcast_buffers=False)
    optimizerD = torch.optim.Adam(netD.parameters(), opt.lr, (0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), opt.lr, (0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(opt.niter):
        sampler.set_epoch(epoch)
        for i, (real,) in enumerate(dataloader):
            real = real.to(device)
            ones = torch.ones(len(real), 1, device=device)

            # (1) the discriminator, on all-real and on all-fake batches
            netD.zero_grad()
            noise = torch.randn(len(real), opt.nz, device=device)
            fake = netG(noise)
            scores = netD(torch.cat((real, fake.detach())))
            errD = criterion(scores, torch.cat((ones, 1 - ones)))
            errD.backward()
            optimizerD.step()

            # (2) the generator
            netG.zero_grad()
            errG = criterion(netD.module(fake), ones)
            errG.backward()
            optimizerG.step()

            if i % 10 == 0 and rank == 0:
                print(
                    f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] Loss_D: {errD.item():.4f} "
                    f"Loss_G: {errG.item():.4f}",
                    flush=True,
                )
        if rank == 0:
            torch.save(netG.module.state_dict(), "netG.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
