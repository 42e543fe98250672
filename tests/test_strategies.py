"""The same training by DDP, fully_shard and DataParallel; networks on several devices."""

from pathlib import Path

from running import NETS, Project

FEW = ["--image-size", 32, "--batch-size", 4, "--workers", 0, "--epochs", 1, "--threads", 1]


def test_fsdp_is_ddp(project: Project, data: Path, tmp_path: Path) -> None:
    """Moments included, to rounding; parts of unequal size, passes that add up, clipping."""
    words = [*FEW, *NETS[project.task], "--clip-grad-norm", 1, "--clip-grad-value", 0.1]
    more = ["--accumulate", 2, "--freeze-backbone", 1, "--backbone-lr", 0.5, "--epochs", 2]
    found = project.call("strategies.differences", data, tmp_path, [1, 2, 3], *words, *more)
    assert max(found) < 1e-9, found
