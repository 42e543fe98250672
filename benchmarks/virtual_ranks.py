"""Are the numbers the same on any number of ranks? And what does --virtual-ranks cost?

Each run trains on the same images, --images of them, with the same global batch: without the flag
the batch of a rank is 16 / ranks; with --virtual-ranks 4 it is 4 on each of these. `weights` is a
checksum of the last bits of all weights, `ms a step` that of the second epoch.
"""

import hashlib
import sys
import tempfile
from pathlib import Path

import common
import torch

GLOBAL_BATCH = 16
NETWORKS = {
    "BatchNorm": "--arch shufflenet_v2_x0_5",
    "LayerNorm": "--arch timm/convnext_atto",
}


def main() -> None:
    parser = common.parser(__doc__, ("classification",))
    parser.add_argument("--images", type=int, default=128, help="in an epoch")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    flags = parser.parse_args()
    common.say_machine(flags)
    lines = [("norm", "flag", "ranks", "train_loss", "top1", "weights", "ms a step")]
    with common.generated(flags.task) as folder:
        project = folder / "project"
        data = common.draw_photos(folder / "data", flags.task, flags.images, (72, 72))
        for norm, network in NETWORKS.items():
            for virtual in (0, 4):
                for ranks in flags.ranks:
                    batch = GLOBAL_BATCH // (virtual or ranks)
                    words = ["--data", data, "--epochs", 2, "--workers", 0]
                    words += ["--image-size", 64, "--batch-size", batch]
                    words += ["--virtual-ranks", virtual, *network.split()]
                    row, weights = train(project, ranks, words)
                    step = 1000 * row["train_seconds"] * GLOBAL_BATCH / flags.images
                    lines.append(
                        (
                            norm,
                            f"--virtual-ranks {virtual}" if virtual else "",
                            str(ranks),
                            str(row["train_loss"]),
                            str(row["top1"]),
                            weights,
                            f"{step:.0f}",
                        )
                    )
    common.markdown(lines)


def start(project: Path, output: Path, words: list, on: int) -> None:
    command = ["bash", project / "launch.sh", "--output-dir", output, *words]
    env = {"NPROC": on, "PYTHON": sys.executable, "OMP_NUM_THREADS": 1}
    common.run([*command, "--weights", "none"], **env)


def train(project: Path, ranks: int, words: list) -> tuple[dict[str, float], str]:
    """Return the last row of metrics.csv, and a checksum of the weights."""
    with tempfile.TemporaryDirectory(prefix="benchmark-run-") as output:
        start(project, Path(output), words, on=ranks)
        last = common.rows(Path(output))[-1]
        state = torch.load(f"{output}/last.pt", weights_only=True, map_location="cpu")
    found = hashlib.sha256()
    for each in state["model"].values():
        found.update(each.contiguous().numpy().tobytes())
    return {name: float(cell) for name, cell in last.items()}, found.hexdigest()[:8]


if __name__ == "__main__":
    main()
