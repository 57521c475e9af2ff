#!/usr/bin/env bash
#SBATCH --job-name=grpo_7b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x.%j.log
# Your site (remove one # to switch a line on; Slurm reads no #SBATCH line after the first command):
##SBATCH --partition=gpu
##SBATCH --account=project
#
# GRPO on a 7B model: 2 nodes of 8 GPUs, on each GPU an engine and a rank of the actor, which take turns.
#
#   sbatch sbatch/grpo_7b.sh [--KEY=VALUE ...]                   from the top of the checkout; keys: grpo_7b.toml
#   sbatch --job-name=NAME sbatch/grpo_7b.sh [--KEY=VALUE ...]  another run, in runs/NAME
#
# Ten minutes before its time is up the run saves and requeues itself, and goes on from there.
# Where requeueing is forbidden, submit a chain of jobs; those that still wait when the run is finished are cancelled:
#   sbatch --array=1-10%1 sbatch/grpo_7b.sh --slurm.chain=true    (or ten times: --dependency=singleton)
# Submitted again with the same run_dir, it goes on from the newest checkpoint.
set -euo pipefail

# ---- Your site: modules, environment, network. ---------------------------------------------------------------------
# A site with modules:   module load python/3.11 cuda/13.0
# A venv, or conda:      source ~/rlhf/bin/activate, or: set +u; source ~/miniconda3/bin/activate rlhf; set -u
# A container:           this script stays outside; options=(--slurm.container=/images/rlhf.sif)
#                        with pyxis also --slurm.container_runtime=pyxis (all: slurm-rlhf train --help slurm)
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # if the nodes' names resolve to a slow network
command=slurm-rlhf
options=()
# ---- End of your site. ----------------------------------------------------------------------------------------------

# Slurm runs a copy of this script, so SLURM_SUBMIT_DIR says where the checkout is.
checkout=${SLURM_SUBMIT_DIR:-$PWD}
for place in "$(dirname "${BASH_SOURCE[0]}")/.." "$checkout" "$checkout/.."; do
  [[ -f $place/sbatch/grpo_7b.toml ]] && root=$(cd "$place" && pwd) && break
done
if [[ -z ${root:-} ]]; then
  echo "grpo_7b: no checkout around $checkout. Submit from its top: sbatch sbatch/grpo_7b.sh" >&2
  exit 2
fi
[[ -x $root/.venv/bin/$command ]] && command=$root/.venv/bin/$command

if ! command -v "$command" >/dev/null; then
  echo "grpo_7b: no $command on $(hostname): make it available in 'Your site' of sbatch/grpo_7b.sh" >&2
  echo "(source VENV/bin/activate, module load ...), or make .venv here: bash sbatch/environment.sh --gpu" >&2
  exit 127
fi

# The job's name is the run's: --job-name=NAME makes it runs/NAME, unless a word here names another run_dir.
name=${ENVIRONMENT:+${SLURM_JOB_NAME:-}} # ENVIRONMENT: Slurm sets it in a batch job, not in an interactive one
[[ ${name:-grpo_7b} == grpo_7b || $* == *run_dir* ]] || set -- "$@" --run_dir="$root/runs/$name"
# exec: Slurm's signals reach the run itself, and its exit code is the job's.
exec "$command" train "$root/sbatch/grpo_7b.toml" "${options[@]}" "$@"
