"""The same training by DDP and fully_shard; networks on several devices."""

from pathlib import Path

import pytest
import torch
from running import NETS, SAME_FOR_BOTH, Project, flags

FEW = ["--image-size", 32, "--batch-size", 2, "--workers", 0]
# Without BatchNorm, before which some gradients are 0 but for rounding, of which AdamW makes steps.
CASES = {
    "classification": ([1, 3], "--arch", "squeezenet1_1"),
    "segmentation": ([2], *NETS["segmentation"], "--optimizer", "sgd", "--lr", 0.001),
}


def test_fsdp_is_ddp(project: Project, few: Path, tmp_path: Path) -> None:
    """Moments included, to rounding; parts of unequal size, passes that add up, clipping."""
    ranks, *words = CASES[project.task]
    words += ["--clip-grad-norm", 1, "--accumulate", 2, "--epochs", 2]
    words += ["--freeze-backbone", 1, "--backbone-lr", 0.5]
    found = project.call("strategies.differences", few, tmp_path, ranks, *FEW, *words)
    assert max(found) < 1e-8, found


@SAME_FOR_BOTH
def test_fsdp_resumes(project: Project, few: Path, tmp_path: Path) -> None:
    """To the bit; and with DDP, or after it, to rounding."""
    words = [*FEW, "--arch", "squeezenet1_1", "--epochs", 2, "--batch-size", 4]
    found = project.call("strategies.resumed", few, tmp_path, *words)
    assert len(set(found["digests"])) == 1
    assert found["turns"] < 1e-8


@SAME_FOR_BOTH
def test_blocks(project: Project) -> None:
    """Inner ones first; none that is not called, is called twice, or has tied weights."""
    found = project.call("strategies.found_blocks")
    assert found == [["0.1", "0.0"], ["0"], ["0"], []]


@SAME_FOR_BOTH
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--sync-bn",), "--sync-bn: torch has it on GPUs only; omit the flag"),
        (("--fsdp", "--ema", 0.9), "--fsdp: only with"),
        (("--fsdp", "--optimizer", "muon"), "--fsdp: only with"),
    ],
)
def test_what_is_refused(
    project: Project, data: Path, tmp_path: Path, words: tuple, line: str
) -> None:
    project.fork(*flags(data, tmp_path, *FEW, *words)).refused(line)


@SAME_FOR_BOTH
def test_a_network_on_two_devices(project: Project, few: Path, tmp_path: Path) -> None:
    """The README's example. Torch takes any number for a CPU: the code runs, the CPU is one."""
    text = (project.folder / "main.py").read_text()
    built = "    model = build_model(args, classes, seeded.channels, weights)\n"
    moved = "    model = model.to(device).to(memory_format=torch.channels_last)\n"
    assert text.count(built) == text.count(moved) == 1
    local = 'int(os.environ["LOCAL_WORLD_SIZE"])'
    other = f"torch.device(device.type, (device.index or 0) + {local})"
    split = (
        f"{built}    import os\n    from snippets.halves import split\n    model = split(model)\n"
    )
    script = tmp_path / "halves.py"
    text = text.replace(built, split).replace(moved, f"{moved}    model.second.to({other})\n")
    script.write_text(text)
    runs = {}
    for name, file in {"whole": "main.py", "halves": script}.items():
        project.fork(*flags(few, tmp_path / name, *FEW), script=file, draws=False).ok()
        runs[name] = torch.load(tmp_path / name / "last.pt", weights_only=True)
    assert next(iter(runs["halves"]["model"])) == "first.0.0.weight"
    pairs = zip(*(run["model"].values() for run in runs.values()), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
