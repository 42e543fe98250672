"""What a rank may print, by Python and by C; then rank 1 is killed in the middle of a line."""

import ctypes
import os
import signal
import sys
import time

from engine.ranks import logs

rank = os.environ["RANK"]
print(f"rank {rank}: terminal {logs.has_terminal()}\n", end="", flush=True)  # in one piece
for number in range(200 if rank == "0" else 0):
    print(f"{number}\n", end="", file=(sys.stdout, sys.stderr)[number % 2], flush=True)
ctypes.CDLL(None).dprintf(2, b"rank %s: by C\n", rank.encode())
if rank == "1":
    time.sleep(0.5)  # for rank 0 to print
    sys.stderr.write("rank 1: half a line")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
