#!/usr/bin/env bash
# Makes the environment `.venv` at the top of the checkout from a list of locked packages, or reuses it when it is current.
#
#   bash sbatch/environment.sh           the one that is there; the CPU environment where there is none
#   bash sbatch/environment.sh --gpu     the GPU environment: CUDA builds, sbatch/gpu.lock; on aarch64 (GH200) too
#   bash sbatch/environment.sh --cpu     the CPU environment, sbatch/cpu.lock
#
# A checkout has one of the two; the other one's option replaces it. Run it where there is a network: a login node will do,
# if it has the architecture of the compute nodes. One gpu.lock serves x86-64 and aarch64: nothing has to be chosen.
#
# SLURM_RLHF_PYTHON        the Python to use (3.11 to 3.13); default: the first suitable one on PATH
# SLURM_RLHF_TORCH_INDEX   package index with CPU builds of torch; default: the configured indexes, then PyTorch's own
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

# Disk space that making an environment takes, with room to spare.
declare -A needed_mib=([cpu]=6000 [gpu]=16000)

say() { printf 'environment: %s\n' "$*" >&2; }

fail() {
  printf 'environment: error: %s\n' "$@" >&2
  exit 1
}

usage() { sed -n '/^# Makes/,/^set -e/{/^set -e/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; }

# Prints cpu or gpu: which environment is there, whole or half made; nothing if this script has made none.
held_kind() {
  [[ ! -e $venv/packages.stamp ]] || cat "$venv/kind" 2>/dev/null || echo cpu
}

# Sets kind and lock: what was asked for, else what is there, else cpu.
choose_kind() {
  kind=${asked:-$(held_kind)}
  kind=${kind:-cpu}
  lock=$root/sbatch/$kind.lock
}

# A virtual environment holds absolute paths, so a checkout that was moved needs a new one, and so does another architecture,
# which may share the disk.
packages_stamp() { printf '%s %s %s%s\n' "$(sha256sum <"$lock" | cut -c1-64)" "$1" "$root" "$(foreign_machine)"; }

foreign_machine() { uname -m | sed -n '/^x86_64$/!s/^/ /p'; }

project_stamp() { sha256sum <"$root/pyproject.toml" | cut -c1-64; }

python_version() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }

is_current() {
  local version
  version=$(python_version "$venv/bin/python") || return 1
  [[ -x $venv/bin/slurm-rlhf ]] &&
    [[ $(cat "$venv/packages.stamp" 2>/dev/null) == "$(packages_stamp "$version")" ]] &&
    [[ $(cat "$venv/project.stamp" 2>/dev/null) == "$(project_stamp)" ]]
}

# Prints the first Python that can make the environment; the reasons against the others go to stderr if there is none.
find_python() {
  local candidate reason
  local -a reasons=() candidates=(python3.11 python3.12 python3.13 python3 python)
  [[ -z ${SLURM_RLHF_PYTHON:-} ]] || candidates=("$SLURM_RLHF_PYTHON")
  for candidate in "${candidates[@]}"; do
    if ! command -v "$candidate" >/dev/null; then
      reasons+=("$candidate: not found")
      continue
    fi
    if reason=$("$candidate" - 2>&1 <<'PYTHON'
import sys

version = ".".join(map(str, sys.version_info[:3]))
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"is Python {version}; 3.11 to 3.13 is needed")
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit(f"has no module {error.name} (on Debian and Ubuntu: apt install python{version.rpartition('.')[0]}-venv)")
PYTHON
    ); then
      command -v "$candidate"
      return
    fi
    reasons+=("$candidate: ${reason##*$'\n'}")
  done
  fail "no suitable Python:" "${reasons[@]/#/  }" \
    "Install Python 3.11, or load your cluster's module of it, or set SLURM_RLHF_PYTHON."
}

# $1: MiB that will be free as well.
check_space() {
  local free_mib
  free_mib=$(($(df -Pm "$root" | awk 'NR == 2 { print $4 }') + ${1:-0}))
  ((free_mib >= needed_mib[$kind])) ||
    fail "$root has $free_mib MiB free, the $kind environment needs ${needed_mib[$kind]}: make room, or clone to a larger disk."
}

# The wheels for aarch64 want a newer C library than those for x86-64.
check_libc() {
  local libc
  libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || return 0
  [[ $(uname -m) != aarch64 || $(printf 'glibc 2.34\n%s\n' "$libc" | sort -V | head -n 1) == "glibc 2.34" ]] ||
    fail "sbatch/gpu.lock needs glibc 2.34 or newer on aarch64, and here is $libc: use a container (sbatch/container.def)."
}

install() {
  "$venv/bin/python" -m pip --disable-pip-version-check install --no-input --no-deps "$@" >>"$venv/install.log" 2>&1
}

# `fail`, after the end of what pip said.
fail_install() {
  tail -n 15 "$venv/install.log" >&2
  fail "$@"
}

install_torch() {
  local requirement
  requirement=$(grep '^torch==' "$lock")
  if [[ -n ${SLURM_RLHF_TORCH_INDEX:-} ]]; then
    install --index-url "$SLURM_RLHF_TORCH_INDEX" "$requirement" ||
      fail_install "no $requirement from SLURM_RLHF_TORCH_INDEX=$SLURM_RLHF_TORCH_INDEX"
  elif ! install "$requirement"; then
    say "the configured package indexes gave no $requirement: asking PyTorch's CPU index"
    install --index-url https://download.pytorch.org/whl/cpu "$requirement" ||
      fail_install "no $requirement, neither from the configured package indexes nor from PyTorch's CPU index." \
        "Without a network, run this once on a node that has one, or set SLURM_RLHF_TORCH_INDEX."
  fi
}

install_packages() {
  local python=$1
  say "making $venv from sbatch/$kind.lock with $python ($(python_version "$python")): a few minutes"
  # The part that is made first says that the directory is ours to remove, should this be interrupted.
  mkdir -p "$venv/tmp"
  : >"$venv/packages.stamp"
  echo "$kind" >"$venv/kind"
  "$python" -m venv "$venv" || fail "$python -m venv failed (the reason is above)."
  # pip unpacks here and not in /tmp, which is small or in memory on many nodes.
  export TMPDIR=$venv/tmp
  # The CUDA build of torch is on the usual index, the CPU build on one of its own.
  [[ $kind == gpu ]] || install_torch
  install --requirement "$lock" ||
    fail_install "pip could not install sbatch/$kind.lock. Without a network, run this once on a node that has one."
  unset TMPDIR
  rm -rf "$venv/tmp"
  packages_stamp "$(python_version "$venv/bin/python")" >"$venv/packages.stamp"
}

read_options() {
  asked=
  while (($#)); do
    case $1 in
      --cpu | --gpu)
        [[ -z $asked || $asked == "${1#--}" ]] || fail "--cpu and --gpu: a checkout has one environment, choose one."
        asked=${1#--}
        ;;
      -h | --help)
        usage
        exit
        ;;
      *) fail "unknown option $1 (valid: --gpu, --cpu, --help)." ;;
    esac
    shift
  done
}

main() {
  read_options "$@"
  choose_kind
  if is_current; then
    say "$venv is current ($kind)"
    return
  fi
  case "$kind $(uname -sm)" in
    *" Linux x86_64" | "gpu Linux aarch64") ;;
    *) fail "sbatch/$kind.lock is not for $(uname -sm). Install by hand: pip install .[gpu,test]" ;;
  esac
  command -v flock >/dev/null || fail "the command flock is missing: install util-linux."
  exec 9>"$root/.venv.lock" || fail "$root is not writable."
  flock --nonblock 9 || {
    say "another process is making $venv: waiting for it"
    flock 9
  }
  choose_kind
  if is_current; then
    say "$venv is current ($kind)"
    return
  fi
  [[ ! -L $venv ]] || fail "$venv is a link to $(readlink "$venv"): remove it, and an environment is made in its place."
  if [[ -e $venv && ! -e $venv/packages.stamp ]]; then
    fail "$venv is there and was not made by this script: move it away."
  fi
  local version
  version=$(python_version "$venv/bin/python") || version=none
  if [[ $(cat "$venv/packages.stamp" 2>/dev/null) != "$(packages_stamp "$version")" ]]; then
    local python
    python=$(find_python)
    local held
    held=$(held_kind)
    [[ -z $held || $held == "$kind" ]] ||
      say "$venv holds the $held environment: the $kind one takes its place (--$held brings it back)"
    check_libc
    # Before what is there goes; what it takes itself becomes free.
    check_space "$(du -sm "$venv" 2>/dev/null | cut -f1)"
    rm -rf "$venv"
    install_packages "$python"
  fi
  # --no-build-isolation: the build needs setuptools alone, which is in the lock, and no network.
  install --no-build-isolation --editable "$root" || fail_install "pip could not install $root."
  project_stamp >"$venv/project.stamp"
  say "$venv is ready ($kind)"
  [[ $kind == cpu ]] || say_what_engines_lack
}

# Warns by the rule of `slurm-rlhf preflight`, where the nodes may well have it.
say_what_engines_lack() {
  local lacking
  lacking=$("$venv/bin/python" -c "
import os
from slurm_rlhf.nodes.examiner import no_compiler
print(no_compiler(os.environ))") || return 0
  [[ -z $lacking ]] ||
    say "$lacking here; engines on GPUs need gcc and Python's development files (python3-dev) on the compute nodes:" \
      "load their module in the batch script, or install them"
}

main "$@"
