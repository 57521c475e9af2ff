#!/usr/bin/env bash
#SBATCH --job-name=ppo_32b
#SBATCH --nodes=16
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
# PPO on a 32B model: 16 nodes of 8 GPUs, on each 3 of actor and reference, 3 of the critic, 1 engine of 2.
#
#   sbatch sbatch/ppo_32b.sh [--KEY=VALUE ...]                   from the top of the checkout; keys: ppo_32b.toml
#   sbatch --nodes=4 sbatch/ppo_32b.sh --actor.num_nodes=4 --critic.num_nodes=4 --ref.num_nodes=4 --vllm.num_engines=4 \
#     --train.max_tokens_per_gpu=8192 --train.forward_max_tokens_per_gpu=16384
#
# Ten minutes before its time is up the run saves and requeues itself, and goes on from there.
# Where requeueing is forbidden, submit a chain of jobs; those that still wait when the run is finished are cancelled:
#   sbatch --array=1-10%1 sbatch/ppo_32b.sh --slurm.chain=true    (or ten times: --dependency=singleton)
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
  [[ -f $place/sbatch/ppo_32b.toml ]] && root=$(cd "$place" && pwd) && break
done
if [[ -z ${root:-} ]]; then
  echo "ppo_32b: no checkout around $checkout. Submit from its top: sbatch sbatch/ppo_32b.sh" >&2
  exit 2
fi
[[ -x $root/.venv/bin/$command ]] && command=$root/.venv/bin/$command

if ! command -v "$command" >/dev/null; then
  echo "ppo_32b: no $command on $(hostname): make it available in 'Your site' of sbatch/ppo_32b.sh" >&2
  echo "(source VENV/bin/activate, module load ...), or make .venv here: bash sbatch/environment.sh --gpu" >&2
  exit 127
fi

# The job's name is the run's: --job-name=NAME makes it runs/NAME, unless a word here names another run_dir.
name=${ENVIRONMENT:+${SLURM_JOB_NAME:-}} # ENVIRONMENT: Slurm sets it in a batch job, not in an interactive one
[[ ${name:-ppo_32b} == ppo_32b || $* == *run_dir* ]] || set -- "$@" --run_dir="$root/runs/$name"
# exec: Slurm's signals reach the run itself, and its exit code is the job's.
exec "$command" train "$root/sbatch/ppo_32b.toml" "${options[@]}" "$@"
