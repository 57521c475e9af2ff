"""Make the source of rewards that the configuration names; an environment's rewards are one of several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.reward_sources import ENVIRONMENT, OTHER_SOURCE, settings_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_models import REWARD_SOURCES, RewardPart
from slurm_rlhf.rewards.function import RewardFunction, importable
from slurm_rlhf.rewards.model import RewardSource, episode_rewards
from slurm_rlhf.rewards.pooled import PooledRewards
from slurm_rlhf.rewards.server import RemoteRewards
from slurm_rlhf.rewards.weighted import WeightedRewards
from slurm_rlhf.user_files import is_of_script
from slurm_rlhf.workers.http import Servers, servers_of
from slurm_rlhf.workers.pool import Code, WorkerNodes


def reward_source(
    config: Config,
    printed: Path | None = None,
    note: Callable[[str], None] = lambda text: None,
    nodes: WorkerNodes = (),
) -> RewardSource | None:
    """Make the source that `reward` and `env` name, None for a reward model alone; `close_source` ends it.

    `printed`: the file for what functions print in workers; None: it is printed as usual. `note` tells the user of
    servers that do not answer. `nodes`: where workers run; empty: here.
    Raises ConfigError, RewardError.
    """
    reward = config.reward
    found: list[tuple[RewardPart, RewardSource | None]] = []
    if config.env.path:
        found.append((RewardPart(name=ENVIRONMENT), episode_rewards))
    for part in reward.sources:
        alone = changed(config, settings_of(part))
        found.append((part, None if part.model else _one_source(alone, printed, note, nodes)))
    if not reward.sources and any(getattr(reward, name) for name in REWARD_SOURCES):
        found.append((RewardPart(name=OTHER_SOURCE), _one_source(config, printed, note, nodes)))
    if not found:  # a teacher alone says what is better
        return episode_rewards
    if len(found) == 1 and not reward.sources:
        return found[0][1]
    return WeightedRewards([part for part, _ in found], [source for _, source in found])


def _one_source(
    config: Config, printed: Path | None, note: Callable[[str], None], nodes: WorkerNodes
) -> RewardSource | None:
    reward = config.reward
    if reward.model_name_or_path:
        return None
    if servers_of(reward.remote_url):
        return RemoteRewards(config, note, printed)
    if reward.preset:
        value = reward.sandbox if reward.preset == "code" else reward.preset_value
        code = Code("slurm_rlhf.rewards.presets", "Preset", {"name": reward.preset, "value": value})
        return PooledRewards(code, config, printed, nodes)
    if not reward.workers:
        return RewardFunction.of(reward, config.data.input_key)
    given: dict[str, Any] = {"source": reward.remote_url, "function": reward.function, "plugins": config.train.plugins}
    given |= importable(reward.function) if is_of_script(reward.function) else {}
    return PooledRewards(Code("slurm_rlhf.rewards.function", "served", given), config, printed, nodes)


def parts_of(source: RewardSource | None) -> list[RewardSource]:
    """List the sources that a source is made of, but for a reward model."""
    parts = source.sources if isinstance(source, WeightedRewards) else [source]
    return [part for part in parts if part is not None]


def servers_in(source: RewardSource | None) -> list[Servers]:
    """List what asks the servers of a source."""
    return [part.servers for part in parts_of(source) if isinstance(part, RemoteRewards)]


def close_source(source: RewardSource | None) -> None:
    """End the processes and connections of a source, if it has any."""
    for part in parts_of(source):
        if isinstance(part, PooledRewards | RemoteRewards):
            part.close()
