#!/usr/bin/env bash
#SBATCH --job-name=pipeline
#SBATCH --nodes=1
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
# The stages of a pipeline, one after the other, in this job's nodes. A job for each stage, with nodes of its own:
# `slurm-rlhf pipeline FILE.toml` on a login node. `slurm-rlhf docs pipeline` shows a file.
#
#   sbatch sbatch/pipeline.sh FILE.toml
#
# Submitted again, it goes on: stages that are done and have not changed do not run again.
set -euo pipefail

# ---- Your site: modules, environment, network (examples: ppo_7b.sh). -----------------------------------------------
command=slurm-rlhf
# ---- End of your site. ----------------------------------------------------------------------------------------------

if (($# != 1)); then
  echo "pipeline: usage: sbatch sbatch/pipeline.sh FILE.toml" >&2
  exit 2
fi
program=${SLURM_SUBMIT_DIR:-$PWD}/.venv/bin/$command
[[ -x $program ]] && command=$program

if ! command -v "$command" >/dev/null; then
  echo "pipeline: no $command on $(hostname): make it available in 'Your site' of sbatch/pipeline.sh" >&2
  echo "(source VENV/bin/activate, module load ...), or make .venv here: bash sbatch/environment.sh --gpu" >&2
  exit 127
fi

# exec: Slurm's signals reach the pipeline, which passes them on to its stage.
exec "$command" pipeline "$1" --local
