"""What recipe.py makes of its flags."""

import io

import torch
from torch import nn

import recipe
from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.run import checkpoint
from flags import parse_args
from snippets.resume import Runs


class Net(nn.Module):
    """Two hidden layers and BatchNorm, with the names that backbone() of both tasks looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs))


def build(*words: object) -> tuple[Net, torch.optim.Optimizer, object]:
    torch.manual_seed(0)
    model, args = Net(), parse_args([*map(str, words)])
    return model, recipe.build_optimizer(model, args), args


def rates(schedule: str, epochs: int, steps: int) -> list[float]:
    """The factor of the learning rate at each step, and at one after the last."""
    words = "--schedule", schedule, "--epochs", epochs, "--lr", 1
    _, optimizer, args = build(*words, "--optimizer", "sgd")
    scheduler = recipe.build_scheduler(optimizer, args, steps)
    found = []
    for _ in range(epochs * steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def groups(*words: str) -> dict[str, list]:
    """Of each weight, by name: optimizer, learning rate, weight decay, momentum."""
    model, optimizer, _ = build(*words)
    name_of = {weight: name for name, weight in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            assert name_of[weight] not in found
            values = (group.get(key) for key in ("lr", "weight_decay", "momentum"))
            found[name_of[weight]] = [type(optimizer).__name__, *values]
    return found


def train(parts: dict, steps: range) -> float:
    model, optimizer = parts["model"], parts["optimizer"]
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :2])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        parts["scheduler"].step()
    return loss.item()


def timms(*names: str) -> dict[str, list]:
    """Of each optimizer: its losses, and whether a resumed one ends with the same bits."""
    distributed.setup()
    found = {}
    for name in names:

        def parts(name: str = name) -> dict:
            model, optimizer, args = build("--optimizer", name, "--epochs", 2, "--lr", 0.01)
            scheduler = recipe.build_scheduler(optimizer, args, 4)
            return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

        whole, stopped, resumed, file = parts(), parts(), parts(), io.BytesIO()
        losses = [train(whole, range(1)), train(whole, range(1, 8))]
        train(stopped, range(3))
        state = checkpoint.take_states(stopped)
        torch.save({**state, "kinds": checkpoint.kinds(stopped), "path": "last.pt"}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        resumed["model"].load_state_dict(state["model"])
        checkpoint.load_states(state, resumed, 3)
        train(resumed, range(3, 8))
        ends = (each["model"].state_dict().values() for each in (whole, resumed))
        is_same = all(torch.equal(*pair) for pair in zip(*ends, strict=True))
        found[name] = [*losses, is_same]
    return found


def refusal(*words: str) -> str:
    try:
        return f"built: {build(*words)[1]}"
    except UserError as error:
        return str(error)


def averages(decay: float) -> list[float]:
    """Differences from an average by hand: of weights, of statistics, of what the forward gives."""
    model, _, _ = build()
    ema = recipe.Ema(model, decay)
    expected = {name: value.double() for name, value in model.state_dict().items()}
    for step in range(20):
        ema.trained(torch.randn(8, 4))
        with torch.no_grad():
            for weight in ema.trained.parameters():
                weight.add_(torch.randn_like(weight))
        ema.update(step)
        share = min(decay, (1 + step) / (10 + step))
        for name, value in ema.trained.state_dict().items():
            expected[name] = share * expected[name] + (1 - share) * value.double()
    assert model.encoder[1].num_batches_tracked == 20
    found = model.state_dict()
    kinds = ("encoder.0.weight", "encoder.1.running_var")
    return [float((found[name] - expected[name]).abs().max()) for name in kinds]


def frozen_modes() -> list[list[bool]]:
    """Whether BatchNorm is in training mode and weights are trained, frozen and not."""
    model, _, _ = build()
    model.encoder[2].bias.requires_grad_(False)  # as of a layer that no decoder reads
    found = []
    for is_frozen in True, True, False:
        recipe.freeze(model, is_frozen)
        recipe.set_training(model)
        found.append([module.training for module in model.modules()])
        found.append([weight.requires_grad for weight in model.parameters()])
    return found


def resumed(data: str, folder: str, *words: object) -> list[str]:
    """Digests of two ranks, three steps an epoch: not stopped, killed in either of two epochs."""
    result = Runs(data, folder, 2, [*words, "--save-every", 2]).result
    return [result("whole"), *(result(f"stop{n}", stop=n) for n in (3, 5))]
