#!/usr/bin/env bash
#SBATCH --job-name=gpu_check
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=00:20:00
#SBATCH --output=%x.%j.log
# Your site (remove one # to switch a line on; Slurm reads no #SBATCH line after the first command):
##SBATCH --partition=gpu
##SBATCH --account=project
#
# The acceptance kit: the checks of one machine on the first node, then those between nodes. Ten minutes at most; it ends
# with a table, and gpu_report.md and gpu_report.json are at the top of the checkout (--gpu_report=DIR: elsewhere, on a
# file system that all nodes share). Make the environment before, where there is a network:
#
#   bash sbatch/environment.sh --gpu
#   sbatch sbatch/gpu_check.sh                 from the top of the checkout; also: --nodes=1, --gres=gpu:4
set -euo pipefail

# ---- Your site: modules, network. -----------------------------------------------------------------------------------
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # if the nodes' names resolve to a slow network
# ---- End of your site. ----------------------------------------------------------------------------------------------

# Slurm runs a copy of this script, so SLURM_SUBMIT_DIR says where the checkout is.
checkout=${SLURM_SUBMIT_DIR:-$PWD}
for place in "$(dirname "${BASH_SOURCE[0]}")/.." "$checkout" "$checkout/.."; do
  [[ -f $place/tests/run.sh ]] && root=$(cd "$place" && pwd) && break
done
if [[ -z ${root:-} ]]; then
  echo "gpu_check: no checkout around $checkout. Submit from its top: sbatch sbatch/gpu_check.sh" >&2
  exit 2
fi

# exec: Slurm's signals reach the tests themselves, and their exit code is the job's.
exec bash "$root/tests/run.sh" -m gpu "$@"
