"""A script of a folder whose front files are edited: edited.py FOLDER SCRIPT STEP FLAG...

ddpkit is the project's own, without its drawings. The ranks are killed after optimizer step
STEP, unless it is 0.
"""

import os
import runpy
import sys
from pathlib import Path

from forked import leave_out_drawings
from snippets.resume import killed_after

folder, script, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
del sys.argv[1:4]
leave_out_drawings()
for name, module in list(sys.modules.items()):  # those of the unedited project
    if str(Path(getattr(module, "__file__", None) or "/").parent) == os.getcwd():
        del sys.modules[name]
sys.path.insert(0, folder)
if step:
    killed_after(step)()
runpy.run_path(f"{folder}/{script}", run_name="__main__")
