"""Check a configuration of `slurm-rlhf generate` before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slurm_rlhf.config.evaluation import data_sets, eval_problems
from slurm_rlhf.config.load import joined
from slurm_rlhf.config.rules import key_problems, length_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

MODEL = "generate.model_name_or_path"


def check_generate(config: Config) -> None:
    """Raise one ConfigError with all that is wrong with keys and files; the model is looked at elsewhere."""
    problems = [
        *key_problems(config),
        *_files(config),
        *length_problems(config),
        *_engine(config),
        *_reward(config),
        *_run_dir(config),
    ]
    if problems:
        raise ConfigError(joined(problems))


def check_eval(config: Config) -> None:
    """Raise one ConfigError with all that is wrong with keys and files of `slurm-rlhf eval`; as `check_generate`."""
    problems = [*key_problems(config), *eval_problems(config), *length_problems(config), *_reward(config)]
    sets = data_sets(config)
    if not sets:
        problems.append("there is nothing to evaluate: name JSONL files of prompts in eval.datasets")
    for one in sets:
        if not Path(one.path).is_file():
            what = "is a directory, not a file" if Path(one.path).is_dir() else "no such file"
            problems.append(f"eval.datasets, {one.name}: {what}: {one.path}")
    reward = config.reward
    if not (reward.remote_url or reward.function or reward.model_name_or_path):
        problems.append("reward.remote_url is not set: name a Python file with reward_func, which scores the responses")
    if problems:
        raise ConfigError(joined(problems))


def _files(config: Config) -> Iterator[str]:
    if not config.generate.model_name_or_path:
        yield f"{MODEL} is not set: name a Hugging Face directory, a run directory or a checkpoint"
    dataset = config.generate.dataset
    if not dataset:
        yield "generate.dataset is not set: name a JSONL or Parquet file of prompts"
    elif not Path(dataset).is_file():
        what = "is a directory, not a file" if Path(dataset).is_dir() else "no such file"
        yield f"generate.dataset: {what}: {dataset}"


def _engine(config: Config) -> Iterator[str]:
    if config.rollout.engine != "vllm":
        yield f"rollout.engine = {config.rollout.engine}: rows are answered by vLLM engines only: use vllm, the default"


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.model_name_or_path:
        yield (
            "reward.model_name_or_path: responses are not scored by a reward model here: use a reward function "
            "(reward.remote_url), or leave it out"
        )
    if reward.remote_url and reward.function:
        yield "reward.remote_url and reward.function are both set: leave one out"
    if reward.remote_url and not Path(reward.remote_url).is_file():
        yield f"reward.remote_url: no such file: {reward.remote_url} (a Python file with reward_func is needed)"


def _run_dir(config: Config) -> Iterator[str]:
    root = Path(config.run_dir)
    if root.exists() and not root.is_dir():
        yield f"run_dir: {root} is a file, not a directory: name another place"
    if (root / "metrics.jsonl").exists() or (root / "checkpoints").is_dir():
        yield (
            f"run_dir: {root} is the directory of a training run, whose files this would replace: give the responses "
            "a directory of their own"
        )
