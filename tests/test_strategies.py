"""Networks on several devices, and what needs GPUs."""

from pathlib import Path

import torch
from running import SAME_FOR_BOTH, Project, flags

FEW = ["--image-size", 32, "--batch-size", 2, "--workers", 0]


@SAME_FOR_BOTH
def test_sync_bn_is_refused_on_cpus(project: Project, data: Path, tmp_path: Path) -> None:
    line = "--sync-bn: torch has it on GPUs only; omit the flag"
    done = project.fork(*flags(data, tmp_path, *FEW, "--sync-bn"))
    done.refused(line)
    assert done.status == 2


@SAME_FOR_BOTH
def test_a_network_on_two_devices(project: Project, few: Path, tmp_path: Path) -> None:
    """That of docs/recipes.md. Torch takes any number for a CPU: the code runs on the one."""
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
