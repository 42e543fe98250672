#!/bin/sh
# Starts a process of main.py for each GPU of this machine, or two without: ./launch.sh --help
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-$(command -v python || command -v python3)} ||
    { echo "error: no python found: set PYTHON" >&2 || true; exit 2; }
# As for main.py, a ddpkit in this folder comes before an installed one.
exec "$python" -c 'import os, sys
sys.path[0] = sys.argv.pop(1)
try:
    import ddpkit.launch
except ModuleNotFoundError:
    try:
        print("error: no ddpkit: start it by uv run ./launch.sh, "
              "or python -m pip install -r requirements.txt", file=sys.stderr)
    finally:
        os._exit(2)  # also if nobody reads it
sys.exit(ddpkit.launch.main())' "$here" "$@"
