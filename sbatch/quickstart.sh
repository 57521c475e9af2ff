#!/usr/bin/env bash
#SBATCH --job-name=quickstart
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=12G
#SBATCH --time=00:30:00
#SBATCH --output=quickstart.%j.log
#
# A small language model learns to add by PPO or another algorithm, on any Linux machine with Python 3.11 and without a GPU.
#
#   bash sbatch/quickstart.sh [--setup-only] [--task=NAME] [--recipe=NAME] [--KEY=VALUE ...]
#   sbatch sbatch/quickstart.sh                                  (from the top of the checkout)
#
# --setup-only   makes the environment and ends; all that follows needs no network
# --task=NAME    a task of reasoning-gym in place of additions, with its own scorer: chain_sum, gcd, spell_backward, ...
# --recipe=NAME  the algorithm of sbatch/recipes/NAME.toml, for example --recipe=grpo; its sizes are the quickstart's
# --KEY=VALUE    overrides a key of sbatch/quickstart.toml, for example --run_dir=/scratch/me/first --train.seed=7
set -euo pipefail

fail() {
  printf 'quickstart: error: %s\n' "$@" >&2
  exit 1
}

is_checkout() { [[ -f $1/sbatch/environment.sh && -f $1/pyproject.toml ]]; }

# Slurm runs a copy of this script from its spool directory: then SLURM_SUBMIT_DIR says where the checkout is.
find_checkout() {
  local place
  for place in "$(dirname "${BASH_SOURCE[0]}")/.." "${SLURM_SUBMIT_DIR:-}" "${SLURM_SUBMIT_DIR:-}/.."; do
    if is_checkout "$place"; then
      cd "$place" && pwd
      return
    fi
  done
  fail "no checkout of slurm_rlhf around ${BASH_SOURCE[0]} or SLURM_SUBMIT_DIR=${SLURM_SUBMIT_DIR:-}." \
    "Submit from the top of the checkout: sbatch sbatch/quickstart.sh"
}

stage() { printf '\n== %s\n' "$*"; }

# The data, and the model that PPO starts from: made once, again when anything that shapes them has changed.
make_input() {
  local recipe script=$root/sbatch/quickstart_data.py
  local -a sources=("$script" "$root/sbatch/quickstart_sft.toml") sft=("$root/sbatch/quickstart_sft.toml")
  if [[ -n $task ]]; then
    script=$root/sbatch/quickstart_task.py
    sources+=("$script")
    sft+=("$input/sft.toml")
  fi
  recipe=$(cat "${sources[@]}" | sha256sum | cut -c1-64)
  mkdir -p "$root/runs"
  exec 9>"$input.lock"
  flock -n 9 || { stage "waits for another quickstart, which makes $input" && flock 9; }
  if [[ $(cat "$input/recipe" 2>/dev/null) != "$recipe" ]]; then
    if [[ $(cat "$input/data" 2>/dev/null) != "$recipe" ]]; then
      rm -rf "$input"
      mkdir "$input"
      stage "2/4 data: ${task:-additions}, and an untrained model"
      "$root/.venv/bin/python" "$script" "$input" ${task:+"$task"}
      echo "$recipe" >"$input/data"
    fi
    stage "3/4 supervised fine-tuning on a careless pupil's answers (about a minute; with --task a few)"
    "$root/.venv/bin/slurm-rlhf" sft "${sft[@]}"
    echo "$recipe" >"$input/recipe"
  else
    stage "2/4 and 3/4 data and fine-tuned model: reused from $input"
  fi
  exec 9>&-
}

# Sets recipe to the name of a recipe that is there, and files to what the run is read from.
choose_recipe() {
  recipe=$1
  local -a known=("$root"/sbatch/recipes/*.toml)
  known=("${known[@]##*/}")
  [[ " ${known[*]%.toml} " == *" $recipe "* ]] ||
    fail "--recipe=$recipe: there is no sbatch/recipes/$recipe.toml. Recipes: ${known[*]%.toml}"
  files=("$root/sbatch/recipes/$recipe.toml" "${files[@]}")
}

setup_only=false
recipe=
task=
overrides=()
for argument in "$@"; do
  case $argument in
    --setup-only) setup_only=true ;;
    --recipe=*) recipe=${argument#*=} ;;
    --task=*) task=${argument#*=} ;;
    --help | -h)
      sed -n '/^# A small/,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit
      ;;
    *) overrides+=("$argument") ;;
  esac
done

root=$(find_checkout)
input=$root/runs/quickstart_input
files=("$root/sbatch/quickstart.toml")
if [[ -n $task ]]; then
  [[ $task =~ ^[a-z0-9_]+$ ]] || fail "--task=$task: give the name of one task of reasoning-gym, as chain_sum"
  input+=_$task
  files+=("$input/task.toml")
fi
[[ -z $recipe ]] || choose_recipe "$recipe"
stage "1/4 environment"
bash "$root/sbatch/environment.sh"
if [[ $setup_only == true ]]; then
  exit
fi
# The environment has CPU builds of torch and vLLM: they must not see a GPU of this machine.
export CUDA_VISIBLE_DEVICES=
make_input
stage "4/4 ${recipe:-PPO}${task:+ on $task}"
# exec: signals of the terminal and of Slurm reach the run itself.
exec "$root/.venv/bin/slurm-rlhf" train "${files[@]}" "${overrides[@]}"
