"""Check the nodes of a job before it trains: ./launch.sh [flags of main.py] --check

In place of main.py on its very nodes and ranks; without launch.sh:
torchrun ... preflight.py [flags], or srun python preflight.py [flags]

Prints what the ranks have in common and what differs: versions, code, devices, data, a sum over all
ranks; in the last line, whether they are ready. The exit status is 0 if they are, else 2.
Nothing is trained, downloaded or left in --output-dir, where a run may be at work.
"""

import sys
from pathlib import Path

import ddpkit
from flags import parse_args

if __name__ == "__main__":  # before torch, whose import takes seconds
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--check"]
    ddpkit.prepare(parse_args)

import demo_set
import main as training  # for its code, and what it imports, to be compared
from ddpkit.check import preflight
from ddpkit.ranks import distributed, process
from ddpkit.run.flags import launch


def main() -> None:
    args = parse_args()
    if args.eval_only:
        raise ddpkit.UserError("--check is for training: leave out --eval-only")
    device = distributed.setup(launch.local_rank, min(launch.dist_timeout, preflight.LIMIT))
    if args.data is None:
        args.data = demo_set.FOLDER
        if distributed.local_rank() == 0:
            demo_set.draw()
    status = preflight.check(Path(training.__file__).resolve().parent, args.data, device)
    distributed.teardown()
    process.exit_now(status)  # a thread may still be in the store


if __name__ == "__main__":
    ddpkit.start(main)
