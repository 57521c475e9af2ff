#!/usr/bin/env bash
# Makes the environment, or reuses it, and runs the tests: bash tests/run.sh [pytest's arguments]
#
# Some tests start a Slurm cluster of their own on this machine. As root on Debian or Ubuntu its packages are installed
# if they are missing; elsewhere those tests skip and say so.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

install_slurm() {
  local -a wanted=() packages=(slurm-wlm:slurmctld slurm-client:scontrol munge:munged iproute2:ip)
  local pair
  for pair in "${packages[@]}"; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${pair#*:}" >/dev/null || wanted+=("${pair%:*}")
  done
  # For srun --mpi=pmix: a library has no command to look for.
  compgen -G '/usr/lib/*/pmix2/lib/libpmix.so.2' >/dev/null || wanted+=(libpmix2)
  if ((${#wanted[@]} == 0 || EUID != 0)) || ! command -v apt-get >/dev/null; then
    return 0
  fi
  printf 'tests: installing %s\n' "${wanted[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  # No service is to start: the tests start their own daemons.
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${wanted[@]}"; } >/dev/null ||
    printf 'tests: %s could not be installed; the tests that need Slurm will skip\n' "${wanted[*]}" >&2
}

install_slurm
bash "$root/sbatch/environment.sh"
cd "$root"
install_slurm
exec .venv/bin/python -m pytest "$@"
