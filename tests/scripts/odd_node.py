"""Runs preflight.py with each rank as a node of its own, n0, n1, ..., the last of which is odd.

    odd_node.py WHAT[,WHAT...] FOLDER [flags]

Each node stands in FOLDER/nN, if there is one, so relative paths are disks of its own.
"""

import os
import sys
import time
from pathlib import Path

import preflight

import engine
from engine.check import preflight as table

whats, folder, *flags = sys.argv[1:]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", SLURMD_NODENAME=f"n{rank}")
if Path(folder, f"n{rank}").is_dir():
    os.chdir(Path(folder, f"n{rank}"))
table.FLOATS, table.SEEN_SECONDS = 2**16, 0
version, checksum, clock = table.metadata.version, table.zlib.crc32, time.time
if whats == "hangs":
    table.LIMIT = 2
for what in whats.split(",") if rank == ranks - 1 else ():
    if what == "version":
        table.metadata.version = lambda name: "0.1" if name == "numpy" else version(name)
    elif what == "code":
        table.zlib.crc32 = lambda data: checksum(data) + (b"def build_optimizer" in data)
    elif what == "variable":
        os.environ["NCCL_SOCKET_IFNAME"] = "eth9"
    elif what == "clock":
        table.time.time = lambda: clock() + 90
    elif what == "hangs":
        table.list_data = lambda _: time.sleep(60)
sys.argv[1:] = flags
engine.start(preflight.main)
