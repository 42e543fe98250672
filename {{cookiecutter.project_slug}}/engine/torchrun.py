"""torchrun, but for its last words: a rank's own error stays the last thing on the screen.

Takes torchrun's arguments. torchrun ends a failed run with a log and a traceback of its own,
whatever the cause, and with status 1; this ends with the status of the rank that failed first.
"""

import signal

# Ctrl-C while the rest is being imported: without a word.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run() -> int:
    logging.disable(logging.ERROR)
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            if "--nnodes" in sys.argv:
                print("error: a rank has failed, here or on another node", file=sys.stderr)
            return failure.exitcode
        # Nobody else can tell of it: a process that a signal ends prints nothing.
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {rank} (process {failure.pid}) was ended by {name}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run())
