"""torch.distributed.launch for F5: it starts sooner, and leaves no temporary files.

torch's launcher makes a file and a folder, and removes neither; and Stop kills it.
"""

import os
import runpy
import subprocess
import sys
import tempfile

LAUNCHER = "torch.distributed.launch"
REMOVE = 'exec 3<&0; (cat <&3; rm -rf "$0") > /dev/null 2>&1 &'

if __name__ == "__main__":
    # Breakpoints are for the ranks; and traced, torch's import takes twice as long.
    if "debugpy" in sys.modules:
        sys.modules["debugpy"].trace_this_thread(False)
    with tempfile.TemporaryDirectory(prefix="ddp-", ignore_cleanup_errors=True) as own:
        tempfile.tempdir = own  # of this process; the ranks keep theirs
        # where the ranks meet; the sockets of their workers lie beside it
        os.environ["DDP_STORE"] = os.path.join(own, "store")
        if os.name == "posix":
            # `cat` ends when this process does, however it ends. In the background, as
            # the debugger kills children.
            words = ["sh", "-c", REMOVE, own]
            remover = subprocess.Popen(
                words, stdin=subprocess.PIPE, start_new_session=True
            )
            remover.wait()
        runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
