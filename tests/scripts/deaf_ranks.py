"""A launcher whose one rank ignores signals: it says so, and kills it."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

sys.path.insert(0, os.getcwd())
from engine.ranks import launcher

launcher.STOP_SECONDS = 1
signals = launcher.Signals()
signals.start_ranks = lambda ranks: None
shell = ["sh", "-c", "trap '' TERM; echo; while :; do sleep 1; done"]
deaf = subprocess.Popen(shell, start_new_session=True, stdout=subprocess.PIPE)
deaf.stdout.readline()
signals.start(SimpleNamespace(pids=lambda: {0: deaf.pid}))
for _ in range(2):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.4)
assert deaf.poll() is None
assert deaf.wait(10) == -9
assert signals.sent == {signal.SIGTERM, signal.SIGKILL}
