"""Make the source of rewards that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.reward_sources import settings_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.rewards.function import REGISTERED, RewardFunction
from slurm_rlhf.rewards.model import RewardSource, no_rewards
from slurm_rlhf.rewards.pooled import PooledRewards
from slurm_rlhf.rewards.remote import RemoteRewards, servers_of
from slurm_rlhf.rewards.weighted import WeightedRewards
from slurm_rlhf.user_files import is_of_script
from slurm_rlhf.workers.pool import Code


def reward_source(
    config: Config, printed: Path | None = None, note: Callable[[str], None] = lambda text: None
) -> RewardSource:
    """Make the source that `reward` names, but for a reward model; `close_source` ends it.

    `printed`: the file for what functions print in workers; None: it is printed as usual. `note` tells the user of
    servers that do not answer. A function that the script itself has registered runs here: no other process knows it.
    Raises ConfigError, RewardError.
    """
    reward = config.reward
    if reward.sources:
        alone = [changed(config, settings_of(part)) for part in reward.sources]
        pairs = zip(reward.sources, alone, strict=True)
        made = [None if part.model else reward_source(one, printed, note) for part, one in pairs]
        return WeightedRewards(reward.sources, made)
    if not (reward.remote_url or reward.preset or reward.function):
        return no_rewards
    if servers_of(reward.remote_url):
        return RemoteRewards(config, note)
    if reward.preset:
        value = reward.sandbox if reward.preset == "code" else reward.preset_value
        code = Code("slurm_rlhf.rewards.presets", "Preset", {"name": reward.preset, "value": value})
        return PooledRewards(code, config, printed)
    if not reward.workers or is_of_script(REGISTERED, reward.function):
        return RewardFunction.of(reward, config.data.input_key)
    given = {"source": reward.remote_url, "function": reward.function, "plugins": config.train.plugins}
    return PooledRewards(Code("slurm_rlhf.rewards.function", "served", given), config, printed)


def parts_of(source: RewardSource | None) -> list[RewardSource]:
    """List the sources that a source is made of, but for a reward model."""
    parts = source.sources if isinstance(source, WeightedRewards) else [source]
    return [part for part in parts if part is not None]


def unhealthy(source: RewardSource | None) -> list[str]:
    """Ask the reward servers of a source whether they are there; list those that are not, and why."""
    return [why for part in parts_of(source) if isinstance(part, RemoteRewards) for why in part.unhealthy()]


def close_source(source: RewardSource | None) -> None:
    """End the processes and connections of a source, if it has any."""
    for part in parts_of(source):
        if isinstance(part, PooledRewards | RemoteRewards):
            part.close()
