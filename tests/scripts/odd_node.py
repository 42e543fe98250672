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
from engine.check import inputs, network, nodes
from engine.check import preflight as table

whats, folder, *flags = sys.argv[1:]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", SLURMD_NODENAME=f"n{rank}")
if Path(folder, f"n{rank}").is_dir():
    os.chdir(Path(folder, f"n{rank}"))
network.FLOATS, network.PAIR_FLOATS, nodes.SEEN_SECONDS = 2**16, 2**16, 0
inputs.SECONDS, network.SMALL_TIMES = 0.2, 2
version, checksum, clock = nodes.metadata.version, nodes.zlib.crc32, time.time


def delay(function, seconds):
    def slow(*args):
        time.sleep(seconds)
        return function(*args)

    return slow


if whats == "hangs":
    table.LIMIT = 2
if "decoding" not in whats:  # on a busy machine a node may seem slow
    inputs.per_second = lambda *_: 1.0
for what in whats.split(",") if rank == ranks - 1 else ():
    if what == "version":
        nodes.metadata.version = lambda name: "0.1" if name == "numpy" else version(name)
    elif what == "code":
        nodes.zlib.crc32 = lambda data: checksum(data) + (b"def build_optimizer" in data)
    elif what == "variable":
        os.environ["NCCL_SOCKET_IFNAME"] = "eth9"
    elif what == "clock":
        network.time.time = lambda: clock() + 90
    elif what == "network":
        network.dist.send = delay(network.dist.send, 0.1)
    elif what == "decoding":
        inputs.open_image = delay(inputs.open_image, 0.1)
    elif what == "hangs":
        inputs.list_data = delay(inputs.list_data, 60)
    elif what == "memory":
        nodes.shutil.disk_usage = lambda _: nodes.shutil._ntuple_diskusage(1, 1, 0)
sys.argv[1:] = flags
engine.start(preflight.main)
