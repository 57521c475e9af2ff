"""Run `slurm-rlhf check FILE.toml`: read everything that a run reads, without starting one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.cli.plan import layout_somewhere, require_fit
from slurm_rlhf.cluster.resources import memory_on
from slurm_rlhf.config.check import check, warnings
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError, cut
from slurm_rlhf.workers.http_client import health_of

if TYPE_CHECKING:
    from slurm_rlhf.data.prompts import PromptSet
    from slurm_rlhf.records import Prompt, Trajectory
    from slurm_rlhf.run.run_inputs import Inputs

ROWS = 4
"""Rows with which the reward function is called."""
_WIDTH = 200  # characters of a prompt


def check_run(arguments: Arguments) -> int:
    """Print what a run would read and do. Raises UserError if something is wrong."""
    config = load_config(arguments.files, arguments.overrides)
    check(config)
    if away := [one for one in health_of(config) if one.away]:
        listed = "; ".join(f"{one.key}: {one.url}: {one.away}" for one in away)
        raise RewardError(f"servers that are not there: {listed}: start them, or correct the address or the token")
    require_fit(memory_on(config, layout_somewhere(config)))
    source = config.data.prompt_dataset or config.data.reasoning_gym
    print(f"keys, files and model directories are right; reading {source}", flush=True)
    with closing(read(config)) as inputs:
        for line in chain(look(config, inputs), _rewards(config, inputs)):
            print(line, flush=True)
    return 0


def read(config: Config) -> Inputs:
    """Read what a run reads, without notes to the user. Raises UserError."""
    from slurm_rlhf.run.run_inputs import Inputs

    return Inputs.read(config, lambda note: None)


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
    """Call the reward function with labels in place of responses. Raises RewardError."""
    if inputs.reward is None:
        yield "rewards: by reward.model_name_or_path, which is not loaded here"
        return
    from slurm_rlhf.rewards.model import Scoring
    from slurm_rlhf.rewards.weighted import WeightedRewards

    if inputs.environments is not None:
        beside = ", and other rewards are added" if isinstance(inputs.reward, WeightedRewards) else ""
        yield f"rewards: by the environment in {inputs.environments.file}{beside}"
        yield from inputs.environments.lines()
        return
    if config.reward.model_name_or_path:
        yield "rewards: the reward model is not loaded here, so the sum of reward.sources is not computed"
        return
    prompts = [inputs.prompts[row] for row in range(min(ROWS, len(inputs.prompts)))]
    answer = Scoring(inputs.reward, config.timeout.reward)(prompts, [_answered(prompt) for prompt in prompts], 0)
    values = ", ".join(f"{value:g}" for value in answer.rewards)
    yield f"rewards of the labels of the first {len(prompts)} prompts, as if they were responses: {values}"


def _answered(prompt: Prompt) -> Trajectory:
    """Make a response with the label as its text, and the prompt's tokens."""
    import numpy as np

    from slurm_rlhf.records import Trajectory

    text = prompt.label if isinstance(prompt.label, str) else ""
    ids = prompt.token_ids
    none, mask = np.zeros(len(ids), np.float32), np.ones(len(ids), np.bool_)
    return Trajectory(prompt.index, 0, ids, ids, none, mask, "stop", text, [])
