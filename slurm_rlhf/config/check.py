"""Rules that span keys or look at files: what can be known to fail is said before anything starts."""

from __future__ import annotations

import os
import string
from collections.abc import Iterator
from pathlib import Path

from slurm_rlhf.config.algorithm import algorithm_of, has_critic
from slurm_rlhf.config.attention import problem as attention_problem
from slurm_rlhf.config.colocated import colocated
from slurm_rlhf.config.load import joined
from slurm_rlhf.config.model_directory import (
    check_architecture,
    check_length,
    check_model_directory,
    check_tensor_parallel,
)
from slurm_rlhf.config.ranges import out_of_range
from slurm_rlhf.config.reward import check_reward_model, reward_source
from slurm_rlhf.config.roles import ROLES, running_roles
from slurm_rlhf.config.sampling import sampling
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.time_limit import minutes
from slurm_rlhf.errors import ConfigError


def check(config: Config) -> None:
    """Everything `slurm-rlhf train` can know beforehand.

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
    """Everything `slurm-rlhf sft` can know beforehand; raises as `check` does."""
    problems = [*out_of_range(config), *_lists(config), *_template(config)]
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
    in_range = list(out_of_range(config))
    yield from in_range
    yield from _lists(config)
    yield from _template(config)
    yield from _output("run_dir", config.run_dir, "where to put everything of the run")
    yield from _needed("actor.model_name_or_path", config.actor.model_name_or_path, "the directory of the model")
    yield from _file("data.prompt_dataset", config.data.prompt_dataset, "a JSONL file of prompts")
    if config.eval.dataset:
        yield from _file("eval.dataset", config.eval.dataset, "a JSONL file of prompts")
    if config.train.kernel_cache not in ("auto", "none"):
        yield from _output("train.kernel_cache", config.train.kernel_cache, "auto, none or a directory")
    yield from reward_source(config)
    yield from _resume(config)
    yield from _frozen(config)
    yield from filter(None, [attention_problem(config.ds.attn_implementation)])
    yield from _slurm(config)
    wrong = list(_algorithm(config))
    yield from wrong
    if not in_range and not wrong:
        yield from _batches(config)
    if not in_range:
        yield from _relations(config)
    if not in_range and not wrong:
        yield from colocated(config)
    if not in_range:
        yield from sampling(config)


def _algorithm(config: Config) -> Iterator[str]:
    """The rules of the algorithm that advantages are estimated by."""
    try:
        algorithm = algorithm_of(config)
    except ConfigError as error:
        yield str(error)
        return
    samples, least = config.rollout.n_samples_per_prompt, algorithm.min_samples_per_prompt
    if samples < least:
        yield (
            f"algo.advantage.estimator = {algorithm.name} compares the responses to one prompt: it needs "
            f"rollout.n_samples_per_prompt of at least {least}, got {samples}"
        )
    if config.critic.freezing_steps and not algorithm.needs_critic:
        yield (
            f"critic.freezing_steps = {config.critic.freezing_steps} trains the critic alone at first, and "
            f"algo.advantage.estimator = {algorithm.name} has none: leave the key out"
        )


def _batches(config: Config) -> Iterator[str]:
    """Every rank of a role gets as many sequences, in every optimizer step and in every forward pass."""
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    responses, batch = prompts * samples, config.train.batch_size
    told = f"rollout.batch_size * rollout.n_samples_per_prompt = {prompts} * {samples} = {responses}"
    if responses % batch:
        fits = _divisors(responses, batch)
        yield f"{told} responses do not divide into optimizer steps of train.batch_size = {batch}: use {fits}"
    for role in running_roles(config):
        group, name = role.settings(config), role.group
        if role.kind == "engine":
            continue
        ranks = group.num_nodes * group.num_gpus_per_node
        sizes = f"{name}.num_nodes * {name}.num_gpus_per_node = {group.num_nodes} * {group.num_gpus_per_node} = {ranks}"
        if role.kind == "trained" and batch % ranks:
            yield f"train.batch_size = {batch} does not divide over {sizes} ranks: use a multiple of {ranks}"
        elif role.kind == "frozen" and responses % ranks:
            yield f"{told} responses do not divide over {sizes} ranks: use a multiple of {ranks}"


def _frozen(config: Config) -> Iterator[str]:
    for role in (row for row in ROLES.values() if row.kind == "frozen"):
        group, name = role.settings(config), role.group
        if group.zero_stage not in (0, 3):
            yield f"{name}.zero_stage takes 0 or 3, got {group.zero_stage}: a frozen model has parameters only to cut"
        elif group.offload and group.zero_stage != 3:
            yield f"{name}.offload needs {name}.zero_stage = 3: DeepSpeed moves parameters that ZeRO-3 has cut"


def _divisors(whole: int, wanted: int) -> str:
    """The divisors of `whole` that are nearest to `wanted`."""
    valid = [n for n in range(1, whole + 1) if whole % n == 0]
    near = sorted(sorted(valid, key=lambda n: abs(n - wanted))[:2])
    return " or ".join(str(n) for n in near)


def _relations(config: Config) -> Iterator[str]:
    if config.data.max_len <= config.rollout.max_new_tokens:
        yield (
            f"data.max_len = {config.data.max_len} leaves no room for a prompt beside "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}: raise the one or lower the other"
        )
    if 0 < config.train.self_check_stop < 1:
        yield (
            f"train.self_check_stop = {config.train.self_check_stop:g} would end a run within the bound that it is "
            "a multiple of: use 1 or more, or 0 to be warned only"
        )
    if config.algo.kl.target and not config.algo.kl.init_coef:
        yield "algo.kl.target needs a coefficient to start from: set algo.kl.init_coef above 0"
    if config.timeout.heartbeat < 4 * config.timeout.heartbeat_interval:
        yield (
            f"timeout.heartbeat = {config.timeout.heartbeat:g} must be at least four heartbeats: "
            f"{4 * config.timeout.heartbeat_interval:g} for timeout.heartbeat_interval = "
            f"{config.timeout.heartbeat_interval:g}"
        )
    yield from _ahead(config)
    holds = {"fp32": ("auto", "fp32"), "bf16": ("auto", "bf16", "fp32")}[config.ds.param_dtype]
    if config.vllm.dtype not in holds:
        yield (
            f"vllm.dtype = {config.vllm.dtype} would round the weights that the actor trains in ds.param_dtype = "
            f"{config.ds.param_dtype}, at every update: use {' or '.join(holds)}"
        )


def _ahead(config: Config) -> Iterator[str]:
    """What sampling while the actor trains excludes, and what means nothing without it."""
    if config.vllm.sync_mode == "inflight" and config.train.full_determinism:
        yield (
            "train.full_determinism = true excludes vllm.sync_mode = inflight: between which two tokens the weights "
            "change depends on time. Use vllm.sync_mode = drain, or leave full_determinism out"
        )
    if config.vllm.sync_mode == "drain" and config.train.async_queue_size > 1:
        yield (
            f"train.async_queue_size = {config.train.async_queue_size} has no effect with vllm.sync_mode = drain, "
            "which samples nothing ahead: set vllm.sync_mode = inflight, or leave the key out"
        )


def _lists(config: Config) -> Iterator[str]:
    if len(config.actor.adam_betas) != 2:
        yield f"actor.adam_betas takes two numbers, got {config.actor.adam_betas}"
    if len(config.actor.eps_clip_low_high) not in (0, 2):
        yield f"actor.eps_clip_low_high takes two numbers or none, got {config.actor.eps_clip_low_high}"
    clip = config.reward.clip_range
    if len(clip) != 2 or clip[0] > clip[1]:
        yield f"reward.clip_range takes two numbers, the lower first, got {clip}"
    if "" in config.rollout.stop:
        yield "rollout.stop holds an empty string, which would end every response at once: leave it out"


def _template(config: Config) -> Iterator[str]:
    template = config.data.input_template
    if not template:
        return
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        fields = [str(error)]
    if fields != [""]:
        yield (
            f"data.input_template needs exactly one {{}} where the prompt goes, got {template!r}: "
            "write {{ and }} for braces that are meant as they are"
        )


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


def _resume(config: Config) -> Iterator[str]:
    if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        yield f"resume takes auto, never or a checkpoint directory; no such directory: {config.resume or repr('')}"
