#!/usr/bin/env bash
#SBATCH --job-name=seeds
#SBATCH --array=1-5
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x.%A_%a.log
# Your site (remove one # to switch a line on; Slurm reads no #SBATCH line after the first command):
##SBATCH --partition=gpu
##SBATCH --account=project
#
# One run for each seed, in a directory of its own: the number of the array's task is the seed.
#
#   sbatch --array=1-5 sbatch/seeds.sh FILE.toml RUN_DIRS [--KEY=VALUE ...]
#
# RUN_DIRS/seed_1 to seed_5 are the run directories. --array=1-5%2 runs two at a time.
set -euo pipefail

# ---- Your site: modules, environment, network (examples: ppo_7b.sh). -----------------------------------------------
command=slurm-rlhf
# ---- End of your site. ----------------------------------------------------------------------------------------------

if (($# < 2)); then
  echo "seeds: usage: sbatch --array=1-5 sbatch/seeds.sh FILE.toml RUN_DIRS [--KEY=VALUE ...]" >&2
  exit 2
fi
seed=${SLURM_ARRAY_TASK_ID:?submit it with --array=FIRST-LAST: the number of the task is the seed}
file=$1 run_dirs=$2
shift 2
program=${SLURM_SUBMIT_DIR:-$PWD}/.venv/bin/$command
[[ -x $program ]] && command=$program

if ! command -v "$command" >/dev/null; then
  echo "seeds: no $command on $(hostname): make it available in 'Your site' of sbatch/seeds.sh" >&2
  echo "(source VENV/bin/activate, module load ...), or make .venv here: bash sbatch/environment.sh --gpu" >&2
  exit 127
fi

# exec: Slurm's signals reach the run itself, and its exit code is the job's.
# slurm.chain=false: the waiting tasks of this array are other runs.
exec "$command" train "$file" --train.seed="$seed" --run_dir="$run_dirs/seed_$seed" "$@" --slurm.chain=false
