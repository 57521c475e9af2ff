"""Make the source of rewards that the configuration names; the rewards of an environment count as a source.

Several are added up: sum of weight_i * clip(reward_i) over those that apply to a response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.reward_sources import ENVIRONMENT, OTHER_SOURCE, settings_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_models import REWARD_SOURCES, RewardPart
from slurm_rlhf.polling import in_thread
from slurm_rlhf.records import F32, LOST, Bool, Prompt, Trajectory
from slurm_rlhf.rewards.function import RewardFunction, importable
from slurm_rlhf.rewards.items import by_prompt
from slurm_rlhf.rewards.pooled import PooledRewards, RemoteRewards
from slurm_rlhf.rewards.scored import Rewards, RewardSource, episode_rewards
from slurm_rlhf.user_files import is_of_script
from slurm_rlhf.workers.http import Servers, servers_of
from slurm_rlhf.workers.pool import Code, WorkerNodes


class WeightedRewards:
    """Asks all sources at once; each is a component of the reward by its name, and a metric."""

    def __init__(self, parts: Sequence[RewardPart], sources: Sequence[RewardSource | None]) -> None:
        """`sources[i]` computes `parts[i]`; None: the reward model, which comes later as `model`."""
        self._parts, self.sources = parts, sources
        self.model: RewardSource | None = None
        self.streams = None not in sources
        """True: the responses to a prompt may be scored while others are sampled."""

    def without_model(self) -> WeightedRewards:
        """Leave the reward model out."""
        kept = [(part, source) for part, source in zip(self._parts, self.sources, strict=True) if source]
        return WeightedRewards(*zip(*kept, strict=True))

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; blocks. Raises what a source raises."""
        asked = []
        for source in self.sources:
            asking = source or self.model
            assert asking is not None
            asked.append(in_thread(partial(asking, prompts, trajectories, step), "reward"))
        found = weighted(self._parts, [call.result() for call in asked], by_prompt(prompts))
        lost = np.array([one.finish_reason == LOST for one in trajectories], dtype=np.bool_)
        if lost.any():  # skip lost episodes even if another source has scored them
            found.skipped = lost if found.skipped is None else found.skipped | lost
        return found


def weighted(parts: Sequence[RewardPart], found: Sequence[Rewards], groups: Sequence[Sequence[int]]) -> Rewards:
    """Add up the rewards of the sources. A response to which none applies is skipped; failures are kept in `failed`.

    A component that does not apply to a response is set to the mean over the prompt's other responses, so that it adds
    nothing where components are normalised one by one (gdpo).
    """
    count = len(found[0].rewards)
    total, logs, components = np.zeros(count), dict[str, F32](), dict[str, F32]()
    skipped = np.stack([np.zeros(count, np.bool_) if each.skipped is None else each.skipped for each in found])
    failed = np.zeros(count, np.str_)
    for part, one, out in zip(parts, found, skipped, strict=True):
        values = np.clip(one.rewards, part.clip[0], part.clip[1]) if part.clip else one.rewards
        total += np.where(out, 0.0, part.weight * values)
        components[part.name] = _filled(values, out, groups)
        logs |= {f"{part.name}/{name}": each for name, each in (one.components | one.extra_logs).items()}
        if one.failed is not None:
            failed = np.where(failed == "", one.failed, failed)
    return Rewards(
        total.astype(np.float32),
        next((one.scores for one in found if one.scores is not None), None),
        logs,
        components,
        np.logical_and.reduce(skipped) if skipped.any() else None,
        failed if (failed != "").any() else None,
    )


def _filled(values: F32, out: Bool, groups: Sequence[Sequence[int]]) -> F32:
    filled = values.astype(np.float32)
    for places in map(np.array, groups):
        inside = places[~out[places]]
        filled[places[out[places]]] = values[inside].mean() if len(inside) else 0.0
    return filled


def reward_source(
    config: Config,
    printed: Path | None = None,
    note: Callable[[str], None] = lambda text: None,
    nodes: WorkerNodes = (),
) -> RewardSource | None:
    """Make the source that `reward` and `env` name, None for a reward model alone; `close_source` ends it.

    `printed`: the file that gets the output of functions in workers; None: it is printed as usual. `note` tells the
    user of servers that do not answer. `nodes`: where workers run; empty: here.
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
    """List the sources that a source is made of, without a reward model."""
    parts = source.sources if isinstance(source, WeightedRewards) else [source]
    return [part for part in parts if part is not None]


def servers_in(source: RewardSource | None) -> list[Servers]:
    """List the clients of reward servers in a source."""
    return [part.servers for part in parts_of(source) if isinstance(part, RemoteRewards)]


def close_source(source: RewardSource | None) -> None:
    """End the processes and connections of a source, if it has any."""
    for part in parts_of(source):
        if isinstance(part, PooledRewards | RemoteRewards):
            part.close()
