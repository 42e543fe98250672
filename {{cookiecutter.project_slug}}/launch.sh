#!/usr/bin/env bash
# Starts a process of main.py for each GPU of this machine, or two without: ./launch.sh --help
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python || command -v python3)} ||
    { echo "error: no python found: set PYTHON" >&2 && exit 2; }
# As for main.py, a ddpkit in this folder comes before an installed one.
exec "$python" -c 'import sys
sys.path[0] = sys.argv.pop(1)
try:
    import ddpkit.launch
except ModuleNotFoundError:
    print("error: no ddpkit: python -m pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)
sys.exit(ddpkit.launch.main())' "$here" "$@"
