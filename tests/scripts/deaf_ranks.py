"""A launcher whose one rank ignores signals: it says so, and kills it."""

import os
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.getcwd())
from ddpkit import launch
from ddpkit.ranks import protocol
from ddpkit.ranks.environment import Nodes

protocol.STOP_SECONDS = 1
ranks = launch.Ranks(Nodes(1, 0, 1, "127.0.0.1", 0))
shell = ["sh", "-c", "trap '' TERM; echo; while :; do sleep 1; done"]
deaf = subprocess.Popen(shell, start_new_session=True, stdout=subprocess.PIPE)
deaf.stdout.readline()
ranks.running = [deaf]


def terminate() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.4)
    assert deaf.poll() is None


threading.Thread(target=terminate).start()
assert ranks.wait() == 128 + signal.SIGTERM
assert deaf.returncode == -9
assert ranks.sent == {signal.SIGTERM, signal.SIGKILL}
