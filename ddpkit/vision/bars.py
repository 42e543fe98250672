"""Progress bars, by tqdm."""

import threading

from tqdm import tqdm as tqdm

# By default tqdm also makes a lock of processes, which one that exits at once leaves to
# Python's resource tracker; that prints a warning.
tqdm.set_lock(threading.RLock())
