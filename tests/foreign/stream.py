"""A GRU on endless texts, one of each rank, read on and on: torchrun --nproc-per-node 2 stream.py

Each rank keeps its place in its text, and the state of the GRU from batch to batch.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

max_steps = int(os.environ.get("MAX_STEPS", 60))
rows, length = 4, 16

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", rank % torch.cuda.device_count())
torch.manual_seed(rank)


class Reader:
    """Rows of bytes of this rank's text, each going on where the one before has ended."""

    def __init__(self):
        words = " ".join(f"{rank} and {n} is {rank + n};" for n in range(80 + 7 * rank))
        data = torch.tensor(list(words.encode()))
        self.data = data[: len(data) // rows * rows].view(rows, -1)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def read(self):
        if self.position + length >= self.data.shape[1]:
            self.position = int(torch.randint(length, ()))  # anew, a little further on
        part = self.data[:, self.position : self.position + length + 1].to(device)
        self.position += length
        return part[:, :-1], part[:, 1:]


class Model(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 128)

    def forward(self, x, hidden):
        outputs, hidden = self.gru(self.embedding(x), hidden)
        return self.head(self.dropout(outputs)), hidden.detach()


reader = Reader()
model = DDP(Model().to(device))
optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)

hidden = None
for step in range(max_steps):
    x, y = reader.read()
    logits, hidden = model(x, hidden)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0 and rank == 0:
        print(f"step {step}: {loss.item():.4f}", flush=True)

torch.save({"model": model.module.state_dict(), "hidden": hidden}, f"rank{rank}.pt")
dist.destroy_process_group()
