"""The same training by DDP, fully_shard and DataParallel; networks on several devices."""

from pathlib import Path

import pytest
from digest import digest
from running import NETS, SAME_FOR_BOTH, Project, flags

FEW = ["--image-size", 32, "--batch-size", 4, "--workers", 0, "--threads", 1]
# Without BatchNorm, before which some gradients are 0 but for rounding, of which AdamW makes steps.
CASES = {
    "classification": ([1, 2, 3], "--arch", "squeezenet1_1"),
    "segmentation": ([2], *NETS["segmentation"], "--optimizer", "sgd", "--lr", 0.001),
}


def test_fsdp_is_ddp(project: Project, data: Path, tmp_path: Path) -> None:
    """Moments included, to rounding; parts of unequal size, passes that add up, clipping."""
    ranks, *words = CASES[project.task]
    words += ["--clip-grad-norm", 1, "--clip-grad-value", 0.1, "--accumulate", 2, "--epochs", 2]
    words += ["--freeze-backbone", 1, "--backbone-lr", 0.5]
    found = project.call("strategies.differences", data, tmp_path, ranks, *FEW, *words)
    assert max(found) < 1e-8, found


@SAME_FOR_BOTH
def test_fsdp_resumes(project: Project, data: Path, tmp_path: Path) -> None:
    """To the bit; and with DDP, or after it, to rounding."""
    words = [*FEW, "--arch", "squeezenet1_1", "--epochs", 2, "--keep", 1]
    found = project.call("strategies.resumed", data, tmp_path, *words)
    assert len(set(found["digests"])) == 1
    assert found["turns"] < 1e-8


@SAME_FOR_BOTH
def test_blocks(project: Project) -> None:
    """Inner ones first; none that is not called or called twice, returns a view, or is tied."""
    plain, weight, twice, view, *others = project.call("strategies.found_blocks")
    assert plain == ["0.1", "0"]
    assert (weight, twice, view) == (["0"], [], ["0.layer"])
    assert others == [[], []]


@SAME_FOR_BOTH
def test_dp(project: Project, data: Path, tmp_path: Path) -> None:
    """One process, to the bit as DDP on a CPU; more are refused."""
    runs = {name: tmp_path / name for name in ("dp", "ddp")}
    for name, out in runs.items():
        project.alone(*flags(data, out, *FEW, "--accumulate", 2, "--strategy", name)).ok()
    assert digest(runs["dp"]) == digest(runs["ddp"])
    done = project.fork(*flags(data, tmp_path / "two", *FEW, "--strategy", "dp"))
    done.refused("--strategy dp: one process uses all GPUs; start python main.py")


@SAME_FOR_BOTH
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--sync-bn",), "--sync-bn: torch has it on GPUs only; omit the flag"),
        (("--strategy", "dp", "--sync-bn"), "--sync-bn: not with --strategy dp"),
        (("--strategy", "fsdp", "--ema", 0.9), "--strategy fsdp: only with"),
        (("--strategy", "fsdp", "--optimizer", "muon"), "--strategy fsdp: only with"),
    ],
)
def test_what_is_refused(
    project: Project, data: Path, tmp_path: Path, words: tuple, line: str
) -> None:
    project.fork(*flags(data, tmp_path, *FEW, *words)).refused(line)
