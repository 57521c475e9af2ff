#!/usr/bin/env bash
# Makes the environment, or reuses it, and runs the tests: bash tests/run.sh [pytest's arguments]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/sbatch/environment.sh"
cd "$root"
exec .venv/bin/python -m pytest "$@"
