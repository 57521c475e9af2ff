#!/usr/bin/env bash
#SBATCH --job-name=sft
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
# Supervised fine-tuning of a 7B model on 2 nodes of 8 GPUs. A reward model, or DPO, with the same files:
#
#   sbatch sbatch/sft.sh [--KEY=VALUE ...]                    from the top of the checkout; keys: sft.toml
#   STAGE=rm sbatch sbatch/sft.sh [--KEY=VALUE ...]           a reward model; STAGE=dpo: preferences
#
# Ten minutes before its time is up the job saves and requeues itself, and goes on from there. Submitted again, it goes
# on from the newest checkpoint in <output_dir>.run.
set -euo pipefail

# ---- Your site: modules, environment, network. ---------------------------------------------------------------------
# A site with modules:   module load python/3.11 cuda/13.0
# A venv, or conda:      source ~/rlhf/bin/activate, or: set +u; source ~/miniconda3/bin/activate rlhf; set -u
# A container:           this script stays outside; options=(--slurm.container=/images/rlhf.sif)
#                        with pyxis also --slurm.container_runtime=pyxis (all: slurm-rlhf sft --help, group slurm)
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # if the nodes' names resolve to a slow network
command=slurm-rlhf
options=()
# ---- End of your site. ----------------------------------------------------------------------------------------------

# Slurm runs a copy of this script, so SLURM_SUBMIT_DIR says where the checkout is.
checkout=${SLURM_SUBMIT_DIR:-$PWD}
for place in "$(dirname "${BASH_SOURCE[0]}")/.." "$checkout" "$checkout/.."; do
  [[ -f $place/sbatch/sft.toml ]] && root=$(cd "$place" && pwd) && break
done
if [[ -z ${root:-} ]]; then
  echo "sft: no checkout around $checkout. Submit from its top: sbatch sbatch/sft.sh" >&2
  exit 2
fi
[[ -x $root/.venv/bin/$command ]] && command=$root/.venv/bin/$command

if ! command -v "$command" >/dev/null; then
  echo "sft: no $command on $(hostname): make it available in 'Your site' of sbatch/sft.sh" >&2
  echo "(source VENV/bin/activate, module load ...), or make .venv here: bash sbatch/environment.sh --gpu" >&2
  exit 127
fi

# exec: Slurm's signals reach the job's own process, and its exit code is the job's.
exec "$command" "${STAGE:-sft}" "$root/sbatch/sft.toml" "${options[@]}" "$@"
