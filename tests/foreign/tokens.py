"""Train a small language model on characters: torchrun --nproc-per-node 2 tokens.py

Batches are drawn at random from one long tensor of tokens; there is no DataLoader.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

max_steps = int(os.environ.get("MAX_STEPS", 60))
grad_accum_steps = 2
batch_size = 8
block_size = 32
learning_rate = 3e-3
warmup_steps = 10
eval_interval = 20

init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = int(os.environ["RANK"])
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
torch.manual_seed(1337 + rank)

text = "".join(f"{n} times {m} is {n * m}. " for n in range(60) for m in range(60))
characters = sorted(set(text))
data = torch.tensor([characters.index(c) for c in text])
train_data = data[: -len(data) // 10]
val_data = data[-len(data) // 10 :]


def get_batch(source):
    starts = torch.randint(len(source) - block_size, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in starts])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in starts])
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, vocab, width=48, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.head = nn.Linear(width, vocab)

    def forward(self, x, targets):
        places = torch.arange(x.shape[1], device=x.device)
        logits = self.head(self.blocks(self.tokens(x) + self.places(places)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(step):
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    share = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return learning_rate * 0.5 * (1 + math.cos(math.pi * share))


model = DDP(GPT(len(characters)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), learning_rate, (0.9, 0.95))

for step in range(max_steps):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    if step % eval_interval == 0 and rank == 0:
        model.eval()
        with torch.no_grad():
            val_loss = model.module(*get_batch(val_data)).item()
        print(f"step {step}  val loss {val_loss:.4f}", flush=True)
        torch.save({"model": model.module.state_dict(), "step": step}, "ckpt.pt")
    model.train()
    for micro_step in range(grad_accum_steps):
        model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        loss = model(*get_batch(train_data)) / grad_accum_steps
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

if rank == 0:
    torch.save({"model": model.module.state_dict(), "step": max_steps}, "ckpt.pt")
destroy_process_group()
