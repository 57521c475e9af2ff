"""Check a configuration before anything starts: its rules, files, model directories, rewards and trackers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slurm_rlhf.config import rules
from slurm_rlhf.config.architectures import ALONE
from slurm_rlhf.config.contents import check_same_tokenizer
from slurm_rlhf.config.evaluation import data_sets, eval_problems
from slurm_rlhf.config.keys import changed, get
from slurm_rlhf.config.load import joined
from slurm_rlhf.config.model_directory import (
    check_adapters,
    check_architecture,
    check_head,
    check_length,
    check_model_directory,
    check_tensor_parallel,
    read_config,
    text_config,
    uncompared,
)
from slurm_rlhf.config.ranges import URLS
from slurm_rlhf.config.reward_sources import part_problems, preset, settings_of
from slurm_rlhf.config.roles import ACTOR, ROLES, has_engines, has_reward, has_teacher, layout_of, running_roles
from slurm_rlhf.config.rule import row_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import StageKeys, minutes
from slurm_rlhf.config.schema_models import REWARD_SOURCES, Ds
from slurm_rlhf.config.user_data import WHAT, data_files
from slurm_rlhf.errors import ConfigError, ModelError, UserError
from slurm_rlhf.user_files import file_and_name

MODEL = "reward.model_name_or_path"
TEACHER = "algo.distill.model_name_or_path"
GENERATED_BY = "generate.model_name_or_path"


def check(config: Config, unmade: Collection[str] = ()) -> None:
    """Check everything that `slurm-rlhf train` can know beforehand.

    `unmade`: keys of models that do not exist yet; they name the models that these are trained from, whose heads are
    not checked. Raises one ConfigError with all problems; ModelError if all of them are in model directories.
    """
    _raise(_training_problems(config), _model_problems(config, unmade))


def check_colocation(config: Config) -> None:
    """Check the ranges of all numbers, and which roles share accelerators. Raises one ConfigError with all problems."""
    _raise(list(rules.out_of_range(config)) or rules.colocated(config), [])


def check_stage(config: Config, stage: str) -> None:
    """Check everything that a stage (`slurm-rlhf sft`, `rm`, `dpo`) can know beforehand; raises as `check` does."""
    keys: StageKeys = get(config, stage)
    problems = [*rules.key_problems(config), *rules.layer_problems(config)]
    problems += _output(f"{stage}.output_dir", keys.output_dir, "where to write the trained model")
    if keys.output_dir and (out := Path(keys.output_dir)).is_dir() and any(out.iterdir()):
        problems += [f"{stage}.output_dir: {out} is there already and is not empty: remove it or name another one"]
    problems += _data(f"{stage}.dataset", keys.dataset)
    if keys.eval_dataset:
        problems += _data(f"{stage}.eval_dataset", keys.eval_dataset)
    if "RANK" not in os.environ:  # with it torchrun says how many ranks there are
        problems += stage_shares_problem(config, stage, config.actor.num_nodes * config.actor.num_gpus_per_node)
    if stage == "dpo":
        problems += row_problems("preferences", config)
    key, actor = "actor.model_name_or_path", config.actor.model_name_or_path
    problems += _needed(key, actor, "the directory of the model")
    how = {"head": stage != "rm", "sampled": False, "tokenizer": True}
    of_model = list(_errors_of(_check_model, key, actor, config.data.max_len, **how)) if actor else []
    if actor and not of_model:
        of_model += _errors_of(_check_layout, config.ds, key, actor)
        if config.lora.rank:
            of_model += _errors_of(check_adapters, key, actor, config.lora.target_modules)
    _raise(problems, of_model)


def stage_shares_problem(config: Config, stage: str, ranks: int) -> Iterator[str]:
    """Check that a stage's batches divide over the ranks, or their groups, and ds.hpz_size the ranks of a node."""
    batch = get(config, f"{stage}.batch_size")
    yield from rules.hpz_problem(config, "actor", config.actor.num_gpus_per_node)
    yield from rules.shares_problem(config, f"{stage}.batch_size = {batch} does", batch, str(ranks), ranks)


def check_generate(config: Config) -> None:
    """Check keys and files of `slurm-rlhf generate`, except the model. Raises one ConfigError with all problems."""
    problems = list(rules.key_problems(config))
    what = "a Hugging Face directory, a run directory or a checkpoint"
    problems += _needed(GENERATED_BY, config.generate.model_name_or_path, what)
    problems += _data("generate.dataset", config.generate.dataset)
    _raise([*problems, *_engines_alone(config), *_no_training_run(config)], [])


def check_eval(config: Config) -> None:
    """Check keys and files of `slurm-rlhf eval`, as `check_generate` does."""
    problems = [*rules.key_problems(config), *eval_problems(config), *_engines_alone(config)]
    if not data_sets(config):
        problems.append("there is nothing to evaluate: name JSONL files of prompts in eval.datasets")
    for one in data_sets(config):
        problems += _data(f"eval.datasets, {one.name}", one.path)
    if not has_reward(config):
        problems.append("reward.remote_url is not set: name a Python file with reward_func, which scores the responses")
    _raise(problems, [])


def _engines_alone(config: Config) -> Iterator[str]:
    """Check rules and rewards of commands whose only ranks are engines."""
    yield from row_problems("lengths", config)
    yield from row_problems("engines_alone", config)
    if not config.reward.model_name_or_path and has_reward(config):
        yield from reward_source(config)


def _no_training_run(config: Config) -> Iterator[str]:
    root = Path(config.run_dir)
    if root.exists() and not root.is_dir():
        yield f"run_dir: {root} is a file, not a directory: name another place"
    if (root / "metrics.jsonl").exists() or (root / "checkpoints").is_dir():
        yield (
            f"run_dir: {root} is the directory of a training run, whose files this would replace: give the responses "
            "a directory of their own"
        )


def warnings(config: Config) -> list[str]:
    """Return the warnings about a checked configuration, which can be run."""
    key, actor = ROLES[ACTOR].model(config)
    compared = uncompared(key, actor) if has_engines(config) else ""
    return list(filter(None, [compared, rules.unused_note(config)]))


def _model_problems(config: Config, unmade: Collection[str]) -> Iterator[UserError]:
    """Check each model directory that a role of the run starts from, and that engines can run the actor's model."""
    directories: dict[str, tuple[str, bool]] = {}
    adapted: set[str] = set()
    for role in running_roles(config):
        key, path = role.model(config)
        adapted |= {key} if config.lora.rank and role.kind == "trained" else set()
        directories[key] = (path, role.head or directories.get(key, ("", False))[1])
    sound = True
    for key, (path, head) in directories.items():
        if path:
            how = {"head": head, "sampled": head, "engines": has_engines(config), "whole": key not in unmade}
            found = list(_errors_of(_check_model, key, path, config.data.max_len, **how))
            found = found or list(_errors_of(_check_layout, config.ds, key, path))
            if key in adapted:
                found = found or list(_errors_of(check_adapters, key, path, config.lora.target_modules))
            yield from found
            sound = sound and not found
    actor_key, actor = ROLES[ACTOR].model(config)
    if actor and sound:
        if has_engines(config):
            yield from _errors_of(check_tensor_parallel, actor_key, actor, config.vllm.tensor_parallel_size)
        if config.reward.model_name_or_path:
            yield from _errors_of(check_reward_model, config)
        if has_teacher(config):
            teacher = config.algo.distill.model_name_or_path
            yield from _errors_of(check_same_tokenizer, TEACHER, teacher, actor, "use a teacher of the actor's family")


def _check_layout(ds: Ds, key: str, path: str) -> None:
    """Check how the model in `path` is to read micro-batches. Raises ConfigError."""
    layout_of(ds, path, key)
    config = text_config(read_config(key, Path(path)))
    found = next((name for name in (str(config.get("model_type")), *config) if name.startswith(ALONE)), "")
    if ds.packing_samples == "always" and found:
        raise ConfigError(
            f"ds.packing_samples = always lays sequences end to end, and {key} = {path} needs a row for each: it "
            f"carries a state from token to token, or has attention of its own ({found}). Use ds.packing_samples = auto"
        )


def _errors_of(rule: Callable[..., object], *arguments: Any, **named: Any) -> Iterator[UserError]:
    """Yield what `rule` raises for these arguments."""
    try:
        rule(*arguments, **named)
    except UserError as error:
        yield error


def _check_model(
    key: str,
    path: str,
    max_len: int,
    *,
    head: bool,
    sampled: bool,
    engines: bool = True,
    tokenizer: bool = False,
    whole: bool = True,
) -> None:
    check_model_directory(key, path, tokenizer=tokenizer or head or key == MODEL)
    check_length(key, path, max_len)
    check_architecture(key, path, head=head, sampled_len=max_len if sampled and engines else 0, engines=engines)
    if whole:
        check_head(key, path, language=head, needed=head or key == MODEL)


def _raise(problems: Iterable[str], of_models: Iterable[UserError]) -> None:
    found, models = list(problems), list(of_models)
    if found or models:
        directories_alone = not found and all(isinstance(error, ModelError) for error in models)
        raise (ModelError if directories_alone else ConfigError)(joined([*found, *map(str, models)]))


def _training_problems(config: Config) -> Iterator[str]:
    yield from rules.rule_problems(config)
    yield from _output("run_dir", config.run_dir, "where to put everything of the run")
    yield from _needed("actor.model_name_or_path", config.actor.model_name_or_path, "the directory of the model")
    yield from _prompts(config)
    for one in data_sets(config):
        key = f"eval.datasets, {one.name}" if config.eval.datasets else "eval.dataset"
        yield from _data(key, one.path)
    if config.train.kernel_cache not in ("auto", "none"):
        yield from _output("train.kernel_cache", config.train.kernel_cache, "auto, none or a directory")
    yield from reward_source(config)
    if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        yield f"resume takes auto, never or a checkpoint directory; no such directory: {config.resume or repr('')}"
    yield from map(str, _errors_of(minutes, config.slurm.time))
    yield from tracker_problems(config)


def _prompts(config: Config) -> Iterator[str]:
    tasks, file = config.data.reasoning_gym, config.data.prompt_dataset
    if not tasks:
        yield from _data("data.prompt_dataset", file)
    elif file:
        yield f"data.prompt_dataset and data.reasoning_gym are both set ({file}, {tasks}): leave one out"
    elif find_spec("reasoning_gym") is None:
        yield "data.reasoning_gym needs the package reasoning-gym: pip install 'slurm_rlhf[rewards]'"


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


def _data(key: str, value: str) -> Iterator[str]:
    yield from _needed(key, value, WHAT)
    if value:
        yield from (f"{key}: {error}" for error in _errors_of(data_files, value))


def reward_source(config: Config) -> Iterator[str]:
    """Check the keys that name where rewards come from: exactly one of them is needed."""
    yield from _file_or_servers("env.path", config.env.path)
    for key, value in (("reward.token", config.reward.token), ("env.token", config.env.token)):
        if value and not value.startswith("env:") and not os.path.isfile(value):
            yield (
                f"{key} names no file that is there, and is not shown, as it may be the token itself: write "
                "env:VARIABLE, or the file that holds the token"
            )
    if config.reward.sources:
        yield from part_problems(config)
        for part in config.reward.sources:
            alone = changed(config, settings_of(part))
            found = [*preset(alone), *_file_or_servers("reward.remote_url", part.remote_url)]
            yield from (f"reward.sources, {part.name}: {problem}" for problem in found)
        return
    yield from preset(config)
    named = [f"reward.{name}" for name in REWARD_SOURCES if getattr(config.reward, name)]
    if len(named) > 1:
        both = "both" if len(named) == 2 else "all"
        yield f"{' and '.join(named)} are {both} set: rewards come from one source, leave all out but one"
    elif not named and not config.env.path and not has_teacher(config):
        known = " nor ".join(f"reward.{name} ({what})" for name, what in REWARD_SOURCES.items())
        yield f"neither {known} nor env.path (an environment) is set: name one, or a teacher (algo.distill)"
    yield from _file_or_servers("reward.remote_url", config.reward.remote_url)


def _file_or_servers(key: str, value: str) -> Iterator[str]:
    """Check the file or the servers that a key names, if it names any."""
    if not value.startswith(URLS):
        file = file_and_name(value)[0]
        if file and not Path(file).is_file():
            yield f"{key}: {'is a directory, not a file' if Path(file).is_dir() else 'no such file'}: {file}"
        return
    for url in value.split(","):
        if "@" in url.rpartition("://")[2].partition("/")[0]:
            token = f"{key.partition('.')[0]}.token"
            yield f"{key} has a password, or a user's name, which config.toml would show: use {token} in its place"
        elif not url.strip().startswith(URLS):
            yield f"{key}: {url.strip()!r} is no http:// or https:// address, as the first one is"


def reward_statistics(path: str) -> tuple[float, float] | None:
    """Read `mean` and `std` from config.json of a reward model, where OpenRLHF writes them; None without both.

    Raises ModelError unless `std` is above 0.
    """
    config = read_config(MODEL, Path(path))
    mean, std = config.get("mean"), config.get("std")
    if mean is None or std is None:
        return None
    numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in (mean, std))
    if not numbers or std <= 0:
        raise ModelError(
            f"reward.normalize_enable: {path}/config.json has mean = {mean!r} and std = {std!r}; two numbers are "
            "needed, std above 0: correct them, or remove both to normalise by running statistics"
        )
    return float(mean), float(std)


def check_reward_model(config: Config) -> None:
    """Check what only a reward model needs: statistics of its scores, the actor's tokenizer. Raises ModelError."""
    path = config.reward.model_name_or_path
    if config.reward.normalize_enable:
        reward_statistics(path)
    remedy = (
        "use a reward model of the actor's family, or call this one from a reward function (reward.remote_url), which "
        "gets the text"
    )
    check_same_tokenizer(MODEL, path, config.actor.model_name_or_path, remedy)


TENSORBOARD = "tensorboard"

PACKAGES = {"wandb": ("wandb",), "trackio": ("trackio",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Tracker -> the modules that it needs; its extra in pyproject.toml brings them. TensorBoard is always there."""

NAMES = (TENSORBOARD, *PACKAGES)
"""Names that logger.use takes."""


def tracker_problems(config: Config) -> Iterator[str]:
    """Find trackers that do not exist or are not installed, and keys that would get into config.toml."""
    for name in dict.fromkeys(config.logger.use):
        if name not in NAMES:
            yield f"logger.use: there is no tracker {name!r} (valid: {', '.join(NAMES)})"
        elif missing := [module for module in PACKAGES.get(name, ()) if find_spec(module) is None]:
            verb = "is" if len(missing) == 1 else "are"
            yield (
                f"logger.use: {name} needs {', '.join(missing)}, which {verb} not installed here: "
                f"pip install 'slurm_rlhf[{name}]' (from a checkout: pip install '.[{name}]')"
            )
    for line in config.slurm.setup:
        for variable in filter(_NAME.search, _SET.findall(line)):  # `export WANDB_API_KEY=...`
            yield (
                f"slurm.setup sets {variable}, and the configuration is copied to run_dir/config.toml and to the "
                "trackers: set it in your own environment, or log in once (`wandb login`, `hf auth login`)"
            )


_NAME = re.compile(r"(^|_)(API_?KEY|TOKEN|PASSWORD|SECRET|CREDENTIALS?)$")
_SET = re.compile(r"\b([A-Z][A-Z0-9_]*)=\S")
_SHORTEST = 6  # characters of a secret; to replace shorter values would garble ordinary words


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Replace each secret value of the environment in `text` by its variable's name."""
    for name, value in environment.items():
        if _NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, f"${name}")
    return text
