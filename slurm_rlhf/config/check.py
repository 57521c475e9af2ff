"""Check a configuration before anything starts: its rules, files and model directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slurm_rlhf.config.architectures import problem as attention_problem
from slurm_rlhf.config.load import joined
from slurm_rlhf.config.model_directory import (
    check_architecture,
    check_length,
    check_model_directory,
    check_tensor_parallel,
)
from slurm_rlhf.config.reward import check_reward_model, reward_source
from slurm_rlhf.config.roles import has_critic
from slurm_rlhf.config.rules import key_problems, rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_cluster import minutes
from slurm_rlhf.errors import ConfigError


def check(config: Config) -> None:
    """Check everything that `slurm-rlhf train` can know beforehand.

    Raises ConfigError with every broken rule, or ModelError for the first model directory that cannot be used.
    """
    _raise(_training_problems(config))
    actor = config.actor.model_name_or_path
    check_model_directory("actor.model_name_or_path", actor, tokenizer=True)
    check_length("actor.model_name_or_path", actor, config.data.max_len)
    check_architecture("actor.model_name_or_path", actor, config.data.max_len)
    check_tensor_parallel("actor.model_name_or_path", actor, config.vllm.tensor_parallel_size)
    if config.critic.model_name_or_path and has_critic(config):
        check_model_directory("critic.model_name_or_path", config.critic.model_name_or_path, tokenizer=False)
    if config.reward.model_name_or_path:
        check_reward_model(config)


def check_sft(config: Config) -> None:
    """Check everything that `slurm-rlhf sft` can know beforehand; raises as `check` does."""
    problems = list(key_problems(config))
    problems += _output("sft.output_dir", config.sft.output_dir, "where to write the trained model")
    problems += _file("sft.dataset", config.sft.dataset, "a JSONL file of examples")
    problems += _needed("actor.model_name_or_path", config.actor.model_name_or_path, "the directory of the model")
    _raise(problems)
    check_model_directory("actor.model_name_or_path", config.actor.model_name_or_path, tokenizer=True)
    check_length("actor.model_name_or_path", config.actor.model_name_or_path, config.data.max_len)


def _raise(problems: Iterator[str] | list[str]) -> None:
    found = list(problems)
    if found:
        raise ConfigError(joined(found))


def _training_problems(config: Config) -> Iterator[str]:
    yield from rule_problems(config)
    yield from _output("run_dir", config.run_dir, "where to put everything of the run")
    yield from _needed("actor.model_name_or_path", config.actor.model_name_or_path, "the directory of the model")
    yield from _file("data.prompt_dataset", config.data.prompt_dataset, "a JSONL file of prompts")
    if config.eval.dataset:
        yield from _file("eval.dataset", config.eval.dataset, "a JSONL file of prompts")
    if config.train.kernel_cache not in ("auto", "none"):
        yield from _output("train.kernel_cache", config.train.kernel_cache, "auto, none or a directory")
    yield from reward_source(config)
    if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        yield f"resume takes auto, never or a checkpoint directory; no such directory: {config.resume or repr('')}"
    yield from filter(None, [attention_problem(config.ds.attn_implementation)])
    yield from _slurm(config)


def _needed(key: str, value: str, what: str) -> Iterator[str]:
    if not value:
        yield f"{key} is not set: name {what}"


def _output(key: str, value: str, what: str) -> Iterator[str]:
    yield from _needed(key, value, what)
    if value:
        there = next(path for path in (Path(value), *Path(value).parents) if path.exists())
        if not there.is_dir():
            yield f"{key}: {there} is a file, not a directory: name another place than {value}"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield f"{key}: you may not write to {there}: name another place than {value}"


def _file(key: str, value: str, what: str) -> Iterator[str]:
    if not value:
        yield f"{key} is not set: name {what}"
    elif not Path(value).is_file():
        yield f"{key}: {'is a directory, not a file' if Path(value).is_dir() else 'no such file'}: {value}"


def _slurm(config: Config) -> Iterator[str]:
    try:
        minutes(config.slurm.time)
    except ConfigError as error:
        yield str(error)
    if config.slurm.container and not config.slurm.container_python:
        yield "slurm.container_python is empty: name the interpreter inside the container"
