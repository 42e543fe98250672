"""Train a small text classifier with accelerate: torchrun --nproc-per-node 2 accelerate_loop.py"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def sentences(count):
    """Numbers of words, and whether more of them are even."""
    g = torch.Generator().manual_seed(0)
    input_ids = torch.randint(64, (count, 12), generator=g)
    return TensorDataset(input_ids, (input_ids % 2 == 0).sum(1).gt(6).long())


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embeddings = nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids):
        return self.classifier(
            self.norm(self.layers(self.embeddings(input_ids))).mean(1)
        )


def training_function(args):
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(args.seed)
    train_dataloader = DataLoader(
        sentences(500), shuffle=True, batch_size=args.batch_size
    )
    eval_dataloader = DataLoader(sentences(100), batch_size=args.batch_size)

    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    lr_scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = (
        accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
        )
    )

    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.num_epochs):
        model.train()
        for step, (input_ids, labels) in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                loss = criterion(model(input_ids), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if step % 10 == 0:
                accelerator.print(f"epoch {epoch}, step {step}: {loss.item():.4f}")

        model.eval()
        correct = 0
        for input_ids, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(input_ids).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            correct += (predictions == labels).sum().item()
        accelerator.print(f"epoch {epoch}: {correct} of {len(eval_dataloader.dataset)}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=10)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
