"""Starts workers by fork and by spawn, and is killed."""

import multiprocessing
import os
import sys
import time

sys.path.insert(0, os.getcwd())
from ddpkit.ranks import process


def work(number: int, ready: multiprocessing.Queue) -> None:
    process.start_worker(number)
    ready.put(os.getpid())
    time.sleep(600)


if __name__ == "__main__":
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        ready = context.Queue()
        for number in range(2):
            context.Process(target=work, args=(number, ready)).start()
        print(method, ready.get(timeout=20), ready.get(timeout=20), flush=True)
    os.kill(os.getpid(), 9)
