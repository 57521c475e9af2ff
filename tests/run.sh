#!/usr/bin/env bash
# Makes the environment, or reuses it, and runs the tests: bash tests/run.sh [pytest's arguments]
#
#   bash tests/run.sh                      all tests but -m full, campaign and gpu, in a session for each core (lanes.py)
#   bash tests/run.sh -m fast              what starts no process group, engine or Slurm: about two minutes, in two sessions
#   bash tests/run.sh tests/trainer -x    any arguments of pytest: one session
#   bash tests/run.sh -m campaign          faults in every phase of real runs, here and on Slurm: an hour
#   bash tests/run.sh -m gpu               the acceptance kit on this machine's GPUs, in the GPU environment: ten minutes
#                                          at most, then a table, gpu_report.md and gpu_report.json (--gpu_report=DIR)
#   bash tests/run.sh -m gpu --rehearse    the same checks on CPUs
#
# Some tests start a Slurm cluster of their own on this machine, some ask shellcheck or a browser. As root on Debian or Ubuntu their
# packages are installed if they are missing; elsewhere those tests skip and say so.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

install_packages() {
  local -a wanted=() packages=(slurm-wlm:slurmctld slurm-client:scontrol munge:munged iproute2:ip shellcheck:shellcheck chromium:chromium)
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
    printf 'tests: %s could not be installed; the tests that need them will skip\n' "${wanted[*]}" >&2
}

# True where the words choose the acceptance kit: -m gpu, -mgpu or -m=gpu.
chooses_gpu() {
  local word previous=
  for word in "$@"; do
    [[ $previous$word == -mgpu || $word == -m=gpu ]] && return
    previous=
    if [[ $word == -m ]]; then previous=-m; fi
  done
  return 1
}

# Ends the script with one line where this machine has no GPU.
require_gpu() {
  local said
  said=$(nvidia-smi -L 2>&1) && grep -q '^GPU [0-9]' <<<"$said" && return
  printf 'tests: no GPU here (nvidia-smi -L: %s). Run it on a node with one; bash tests/run.sh -m gpu --rehearse runs %s\n' \
    "$(head -n 1 <<<"${said##*: line }")" 'the same checks on CPUs' >&2
  exit 2
}

# Ends the script where .venv is the GPU environment: its vLLM does not run on CPUs, and to replace it is the user's to say.
require_cpu_environment() {
  [[ $(cat "$root/.venv/kind" 2>/dev/null) == gpu ]] || return 0
  printf 'tests: .venv is the GPU environment, and these tests run on CPUs: use another checkout, or replace it by %s\n' \
    'bash sbatch/environment.sh --cpu' >&2
  exit 2
}

if chooses_gpu "$@" && [[ " $* " != *" --rehearse "* ]]; then
  require_gpu
  bash "$root/sbatch/environment.sh" --gpu
elif chooses_gpu "$@"; then
  require_cpu_environment
  bash "$root/sbatch/environment.sh" --cpu
else
  require_cpu_environment
  install_packages
  bash "$root/sbatch/environment.sh" --cpu
fi
cd "$root"
# Each of the hundreds of processes would compile the package anew.
unset PYTHONDONTWRITEBYTECODE
if (($#)) && [[ $* != "-m fast" ]]; then
  exec .venv/bin/python -m pytest "$@"
fi
exec .venv/bin/python tests/support/lanes.py "$@"
