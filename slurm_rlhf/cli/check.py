"""Run `slurm-rlhf check FILE.toml`: read everything that a run, a stage or a pipeline reads, without starting one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_rlhf.cli.commands import Arguments, read_by, refuse_unread_keys, unread
from slurm_rlhf.cli.pipeline import left_of, read_whole
from slurm_rlhf.cli.plan import layout_somewhere, require_fit
from slurm_rlhf.cluster.resources import memory_on
from slurm_rlhf.config.check import check, check_stage, warnings
from slurm_rlhf.config.keys import get
from slurm_rlhf.config.load import load_config, read_toml
from slurm_rlhf.config.pipeline import GENERATE, TRAIN
from slurm_rlhf.config.reward_sources import runs_programs
from slurm_rlhf.config.roles import of_command
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.errors import ConfigError, EpisodeError, RewardError, UserError, cut
from slurm_rlhf.observe.run_log import SERVER_AWAITED
from slurm_rlhf.workers.http import health_of

if TYPE_CHECKING:
    from slurm_rlhf.data.prompts import PromptSet
    from slurm_rlhf.records import Prompt, Trajectory
    from slurm_rlhf.run.conductor import Inputs

ROWS = 4
"""Rows with which the reward function is called."""
_WIDTH = 200  # characters of a prompt


@dataclass(frozen=True, slots=True)
class Part:
    """Names a command that the user's file is for, and holds its configuration."""

    name: str
    command: str
    config: Config
    model: str = ""  # directory of the model that `eval` evaluates
    unmade: Collection[str] = ()  # keys whose models an earlier stage has yet to make: other models stand in for them

    def lines(self) -> Iterator[str]:
        """Check what the command checks before any rank starts, and describe what it would do. Raises UserError."""
        if self.command in STAGES:
            return _stage(self.config, self.command)
        return _run(self.config, self.unmade) if self.command == TRAIN else _answers(self)


def check_file(arguments: Arguments) -> int:
    """Print what the file's commands would read and do. Raises UserError if something is wrong."""
    if len(arguments.files) == 1 and "stage" in read_toml(arguments.files[0]):
        parts = list(_parts_of_pipeline(arguments))
    else:
        config = load_config(arguments.files, arguments.overrides)
        parts = [Part(name, name, config) for name in (*STAGES, GENERATE) if get(config, f"{name}.dataset")]
        if not parts or config.data.prompt_dataset or config.data.reasoning_gym:
            parts.append(Part(TRAIN, TRAIN, config))
    read = tuple(read_by(part.command for part in parts))
    refuse_unread_keys(replace(arguments, command=replace(arguments.command, keys=read)))
    if ignored := dict.fromkeys(key for part in parts for key in unread(part.config, read)):
        print(f"note: nothing here reads {', '.join(ignored)}")
    problems: dict[str, UserError] = {}
    for part in parts:
        try:
            for line in part.lines():
                print(f"{part.name}: {line}" if len(parts) > 1 else line, flush=True)
        except UserError as error:
            problems[part.name] = error
    if problems and len(parts) == 1:
        raise problems[parts[0].name]
    if problems:
        raise ConfigError("\n".join(f"{name}: {error}" for name, error in problems.items()))
    return 0


def _parts_of_pipeline(arguments: Arguments) -> Iterator[Part]:
    """Yield the stages that would run."""
    if arguments.overrides:
        raise arguments.error("a pipeline has its keys in its file")
    whole, hashes = read_whole(arguments.files[0])
    left = {stage.name for stage in left_of(whole, hashes)}
    for stage, unmade in whole.foreseen():
        if stage.name not in left:
            print(f"{stage.name}: done, and nothing of it has changed")
            continue
        read = [word.partition("=")[2] for word in stage.words]
        if absent := [path for path in read if path.startswith(str(whole.root)) and not Path(path).exists()]:
            print(f"{stage.name}: not looked at, as a stage before it makes what it reads: {', '.join(absent)}")
            continue
        yield Part(stage.name, stage.command, stage.config(), stage.option("model"), unmade)


def _stage(config: Config, name: str) -> Iterator[str]:
    """Check a stage that trains on a data set, and read its examples."""
    check_stage(config, name)
    require_fit(memory_on(config, layout_somewhere(of_command(config, name)), name))
    yield f"keys, files and model directory are right; reading {get(config, f'{name}.dataset')}"
    from slurm_rlhf.stages.stage import read_inputs

    inputs, batch = read_inputs(config, name), get(config, f"{name}.batch_size")
    for key, found in (("dataset", inputs.examples), ("eval_dataset", inputs.held_out)):
        if found:
            dropped = f", {len(found.dropped)} dropped (longer than {config.data.max_len} tokens)" * bool(found.dropped)
            yield f"{name}.{key}: {len(found)} examples in {get(config, f'{name}.{key}')}{dropped}"
    yield f"steps: {inputs.steps}, each with {batch} examples"


def _answers(part: Part) -> Iterator[str]:
    """Check a command whose ranks are engines, and read its rows."""
    config = part.config
    if part.command == GENERATE:
        from slurm_rlhf.generate.job import prepare
        from slurm_rlhf.generate.rows import read_dataset

        _, source = prepare(config, {})
        total, _ = read_dataset(config, source.base or source.model)
        yield f"generate.dataset: {total} rows in {config.generate.dataset}"
        return
    if not part.model:
        raise ConfigError("model is not set: name what to evaluate, {NAME} for what the stage NAME makes")
    from slurm_rlhf.generate.job import EvalJob

    job = EvalJob.prepare(config, Path(part.model), Path(config.run_dir))
    yield from (_data(f"evaluation {one.settings.name}", one.prompts, config) for one in job.sets)


def _run(config: Config, unmade: Collection[str]) -> Iterator[str]:
    """Check a run of `train`, read its inputs, and call its rewards."""
    check(config, unmade)
    if away := [one for one in health_of(config) if one.away]:
        listed = "; ".join(f"{one.key}: {one.url}: {one.away}" for one in away)
        raise RewardError(f"servers that are not there: {listed}: start them, or correct the address or the token")
    require_fit(memory_on(config, layout_somewhere(config)))
    source = config.data.prompt_dataset or config.data.reasoning_gym
    yield f"keys, files and model directories are right; reading {source}"
    with closing(read(config)) as inputs:
        yield from chain(look(config, inputs), _rewards(config, inputs))


def read(config: Config) -> Inputs:
    """Read what a run reads, without notes to the user. Raises UserError, also where a run would wait for a server."""
    from slurm_rlhf.run.conductor import Inputs

    return Inputs.read(config, _no_waiting)


def _no_waiting(note: str) -> None:
    if note.startswith(SERVER_AWAITED):
        why = note.removeprefix(f"{SERVER_AWAITED}: ")
        raise RewardError(f"{why}: a run would wait until a server answers: start it, or correct the address")


def looked(config: Config) -> list[str]:
    """Describe the data, as `look` does. Raises UserError."""
    with closing(read(config)) as inputs:
        return [*look(config, inputs)]


def look(config: Config, inputs: Inputs) -> Iterator[str]:
    """Describe the data as the model sees it, and for how many steps it is enough."""
    from slurm_rlhf.eval.sets import answered
    from slurm_rlhf.eval.verdicts import PROMPT_SHARES
    from slurm_rlhf.eval.verdicts import warnings as share_warnings

    yield from (f"warning: {text}" for text in warnings(config))
    yield _data("data.prompt_dataset", inputs.prompts, config)
    yield from (_data(f"evaluation {one.settings.name}", one.prompts, config) for one in inputs.evaluation)
    per_episode = inputs.order.batches_per_episode
    yield (
        f"steps: {inputs.total_steps}, each with {config.rollout.batch_size} prompts and "
        f"{config.rollout.n_samples_per_prompt} responses to each; one pass over the prompts is {per_episode} steps"
    )
    first = inputs.prompts[0]
    yield f"the first prompt, {len(first.token_ids)} tokens: {cut(repr(first.text), _WIDTH)}"
    yield f"its label: {cut(repr(first.label), _WIDTH)}"
    yield from share_warnings(inputs.findings.shares, PROMPT_SHARES)
    yield from answered(inputs.evaluation)
    if inputs.findings.template:
        yield f"warning: {inputs.findings.template}"


def _data(name: str, found: PromptSet, config: Config) -> str:
    longest = config.data.max_len - config.rollout.max_new_tokens
    dropped = f", {found.dropped} dropped (longer than {longest} tokens)" if found.dropped else ""
    return f"{name}: {len(found)} prompts in {found.path}{dropped}"


def _rewards(config: Config, inputs: Inputs) -> Iterator[str]:
    """Call the reward function with labels in place of what the policy writes. Raises RewardError, EpisodeError."""
    if inputs.reward is None:
        yield "rewards: by reward.model_name_or_path, which is not loaded here"
        return
    from slurm_rlhf.rewards.pooled import FAIL
    from slurm_rlhf.rewards.scored import Scoring
    from slurm_rlhf.rewards.sources import WeightedRewards
    from slurm_rlhf.sandbox.box import chosen, described

    if runs_programs(config):
        yield f"sandbox here: {described(chosen(config.reward.sandbox))}"
    if inputs.environments is not None:
        first, others = inputs.prompts[0], isinstance(inputs.reward, WeightedRewards)
        yield f"rewards: by the environment in {inputs.environments.file}{', and other rewards are added' * others}"
        yield from inputs.environments.lines()
        began, played = inputs.environments.try_out(first, _label(first), "data.prompt_dataset")
        yield f"an episode of the first row begins: {cut(repr(began), _WIDTH)}"
        if isinstance(played, EpisodeError):
            yield f"warning: an episode of the first row whose turns are its label is lost: {played}"
            return
        prompts, answers = [first, first], [played, played]
        whose = f"episode of the first row whose turns are its label ({played.turns} in all)"
    else:
        prompts = [inputs.prompts[row] for row in range(min(ROWS, len(inputs.prompts))) for _ in range(2)]
        answers = [_answered(prompt) for prompt in prompts]  # two of each: one number for several would pass otherwise
        whose = f"labels of the first {len(prompts) // 2} prompts, as if they were responses"
    reward = inputs.reward
    if config.reward.model_name_or_path and isinstance(reward, WeightedRewards):
        yield "rewards: the reward model is not loaded here and left out"
        reward = reward.without_model()
    try:
        answer = Scoring(reward, config.timeout.reward, note=print)(prompts, answers, 0)
    except RewardError as error:
        if inputs.environments is None or config.reward.on_error == FAIL:
            raise
        yield f"warning: the {whose} has no reward: {error}"
        return
    yield f"rewards of the {whose}: {', '.join(f'{value:g}' for value in answer.rewards[::2])}"


def _label(prompt: Prompt) -> str:
    """Return the label as a text that the policy could write."""
    return "" if prompt.label is None else str(prompt.label)


def _answered(prompt: Prompt) -> Trajectory:
    """Make a response with the label as its text, and the prompt's tokens."""
    import numpy as np

    from slurm_rlhf.records import Trajectory

    ids = prompt.token_ids
    none, mask = np.zeros(len(ids), np.float32), np.ones(len(ids), np.bool_)
    return Trajectory(prompt.index, 0, ids, ids, none, mask, "stop", _label(prompt), [])
