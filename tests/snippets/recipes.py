"""What recipe.py makes of its flags."""

import torch
from torch import nn

import main
import recipe
from engine.ranks import distributed
from snippets.resume import Runs


class Net(nn.Module):
    """Two hidden layers and BatchNorm, with the names that backbone() of both tasks looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs))


def build(*words: str) -> tuple[Net, torch.optim.Optimizer, main.Namespace]:
    torch.manual_seed(0)
    model, args = Net(), main.parse_args([*words])
    args.batch_size = args.batch_size or 4
    return model, recipe.build_optimizer(model, args), args


def rates(schedule: str, epochs: int, steps: int, warmup: float) -> list[float]:
    """The factor of the learning rate at each step, and at one after the last."""
    words = "--schedule", schedule, "--epochs", epochs, "--warmup-epochs", warmup, "--lr", 1
    _, optimizer, args = build(*map(str, words), "--optimizer", "sgd")
    scheduler = recipe.build_scheduler(optimizer, args, steps)
    found = []
    for _ in range(epochs * steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def groups(*words: str) -> dict[str, list]:
    """Of each weight, by name: optimizer, learning rate, weight decay, momentum and Nesterov."""
    distributed.setup()
    model, optimizer, _ = build(*words)
    name_of = {weight: name for name, weight in model.named_parameters()}
    keys = "lr", "weight_decay", "momentum", "nesterov"
    found = {}
    for group in optimizer.param_groups:
        kind = type(getattr(optimizer, "parts", [optimizer])[group.get("part", 0)]).__name__
        for weight in group["params"]:
            assert name_of[weight] not in found
            found[name_of[weight]] = [kind, *(group.get(key) for key in keys)]
    return found


def muon_by_hand() -> float:
    """The greatest difference between three steps of --optimizer muon and of torch's two."""
    ours, optimizer, args = build("--optimizer", "muon", "--weight-decay", "0.1")
    theirs, _, _ = build()
    encoder, head = theirs.encoder, theirs.head
    plain = [w for w in theirs.parameters() if w.ndim == 1]
    adamw = [{"params": [head.weight]}, {"params": plain, "weight_decay": 0.0}]
    both = [
        torch.optim.Muon(
            [encoder[0].weight, encoder[2].weight], args.lr, 0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(adamw, args.lr, weight_decay=0.1),
    ]
    for step in range(3):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for model, optimizers in (ours, [optimizer]), (theirs, both):
            model(inputs).square().sum().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        if not step:  # as a resumed run does
            _, resumed, _ = build("--optimizer", "muon", "--weight-decay", "0.1")
            for group, own in zip(resumed.param_groups, optimizer.param_groups, strict=True):
                group["params"] = own["params"]
            resumed.load_state_dict(optimizer.state_dict())
            optimizer = resumed
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def averages(decay: float) -> list[float]:
    """Differences from an average by hand: of weights, of statistics, of counted batches."""
    model, _, args = build("--ema", str(decay))
    average = recipe.Average(model, args.ema)
    expected = {name: value.double() for name, value in model.state_dict().items()}
    for step in range(20):
        model(torch.randn(8, 4))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
        average.update(model)
        share = min(decay, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            expected[name] = share * expected[name] + (1 - share) * value.double()
    found = average.module.state_dict()
    differences = {name: float((found[name] - expected[name]).abs().max()) for name in found}
    kinds = ("encoder.0.weight", "encoder.1.running_var")
    return [differences[name] for name in kinds]


def frozen_modes() -> list[list[bool]]:
    """Whether BatchNorm is in training mode, frozen and not."""
    model, _, _ = build()
    found = []
    for is_frozen in True, False:
        recipe.freeze(recipe.backbone(model), is_frozen)
        recipe.set_training(model)
        found.append([module.training for module in model.modules()])
    return found


def resumed(data: str, folder: str, *words: object) -> list[str]:
    """Digests of two ranks, three steps an epoch: not stopped, killed in either of two epochs."""
    result = Runs(data, folder, 2, [*words, "--save-every", 2]).result
    return [result("whole"), *(result(f"stop{n}", stop=n) for n in (3, 5))]
