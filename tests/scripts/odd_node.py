"""Runs preflight.py with each rank as a node of its own, n0, n1, ..., the last of which is odd.

    odd_node.py WHAT[,WHAT...] FOLDER [flags]

Each node stands in FOLDER/nN, if there is one, so relative paths are disks of its own.
"""

import os
import sys
import time
from pathlib import Path

import preflight

import ddpkit
from ddpkit.check import preflight as table

whats, folder, *flags = sys.argv[1:]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", SLURMD_NODENAME=f"n{rank}")
if Path(folder, f"n{rank}").is_dir():
    os.chdir(Path(folder, f"n{rank}"))
table.FLOATS = 2**16
version, checksum = table.metadata.version, table.zlib.crc32
reduced, gathered = table.distributed.reduce_tensor, table.distributed.gather_objects
if whats == "hangs":
    table.LIMIT = 2
for what in whats.split(",") if rank == ranks - 1 else ():
    if what == "version":
        table.metadata.version = lambda name: "0.1" if name == "numpy" else version(name)
    elif what == "code":
        table.zlib.crc32 = lambda data, *start: (
            checksum(data, *start) + (b"def build_optimizer" in data)
        )
    elif what == "device":
        table.distributed.gather_objects = lambda own: gathered(
            (own[0], {**own[1], "device": "another"})
        )
    elif what == "sum":
        table.distributed.reduce_tensor = lambda tensor: reduced(tensor) + 1
    elif what == "hangs":
        table.list_data = lambda _: time.sleep(60)
sys.argv[1:] = flags
ddpkit.start(preflight.main)
