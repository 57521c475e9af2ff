"""Metrics of a step: the samples and their rewards, engines against actor, and the work of each engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median

import numpy as np

from slurm_rlhf.algorithms.losses import ages
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.environments.records import CALLS, ERRORS
from slurm_rlhf.eval.verdicts import constant_share
from slurm_rlhf.observe.run_log import WARNING
from slurm_rlhf.records import LOST, REPETITION, STOP, EngineLoad, Experience, Trajectory
from slurm_rlhf.rewards.scored import Rewards

SHARE = 0.5
"""An engine below this share of the median of its peers counts as far below them."""
STEPS = 2
"""Number of such steps in a row after which the engine is reported: a single hiccup is not."""


def far_below(rates: Mapping[int, float]) -> dict[int, float]:
    """Map each engine below `SHARE` of the median rate of all other engines to that median.

    `rates`: engine -> tokens per second while it had requests; engines that had none (rate 0) are left
    out. With two engines the peers' median is the other one's rate, so one slow engine of two is found.
    """
    active = {engine: rate for engine, rate in rates.items() if rate > 0}
    found = {}
    for engine, rate in active.items():
        peers = [other for number, other in active.items() if number != engine]
        if peers and rate < SHARE * median(peers):
            found[engine] = median(peers)
    return found


def sample_metrics(
    config: Config, trajectories: list[Trajectory], rewards: Rewards, experience: Experience
) -> dict[str, float]:
    """Describe a batch by what was sampled and how it was rewarded."""
    compared = experience.rewards
    if rewards.components and algorithm_of(config).needs_components:
        compared = np.stack(list(rewards.components.values()), axis=1)
    metrics = {
        "reward": float(np.mean(rewards.rewards)),
        "reward_std": float(np.std(rewards.rewards)),
        "reward_min": float(np.min(rewards.rewards)),
        "reward_max": float(np.max(rewards.rewards)),
        "response_length": float(experience.action_mask.sum() / len(experience)),
        "response_tokens": float(experience.action_mask.sum()),
        "truncated": float(np.mean([t.finish_reason not in (STOP, LOST) for t in trajectories])),
        "reward_constant": constant_share(compared, config.rollout.n_samples_per_prompt),
    }
    if config.rollout.repetition_detection_max_pattern_size:
        metrics["repetition"] = float(np.mean([t.finish_reason == REPETITION for t in trajectories]))
    if config.env.path:
        counts = sum((Counter(t.counts) for t in trajectories), Counter[str]())
        calls = counts.pop(CALLS, 0)
        metrics["turns"] = float(np.mean([t.turns for t in trajectories]))
        metrics["lost"] = float(np.mean([t.finish_reason == LOST for t in trajectories]))
        metrics["tools/calls"] = calls / len(trajectories)
        # Errors of tools are shares of the calls.
        metrics |= {f"tools/{kind}": counts[kind] / calls for kind in ERRORS} if calls else {}
    if rewards.scores is not None:
        metrics["accuracy"] = float(np.mean(rewards.scores))
    if rewards.skipped is not None:
        metrics["reward/skipped"] = float(rewards.skipped.mean())
    if rewards.failed is not None:
        metrics["reward/failed"] = float(np.mean(rewards.failed != ""))
    named = rewards.components | rewards.extra_logs
    return metrics | {f"reward/{name}": float(np.mean(values)) for name, values in named.items()}


def agreement_metrics(
    config: Config, trajectories: list[Trajectory], experience: Experience, version: int
) -> dict[str, float]:
    """Compare engine and actor on a batch; the actor's log-probs in `experience` are those of policy `version`.

    stale_logprob_diff: mean distance over the tokens of older policies, which is how far the policy has moved.
    """
    mask, columns, metrics = experience.action_mask, experience.columns, dict[str, float]()
    drift = np.abs(columns["rollout_logprobs"] - columns["logprobs"])
    age = ages(trajectories, version)
    ahead = config.vllm.sync_mode == "inflight"
    if (fresh := drift[mask & (age == 0)]).size or not ahead:
        # Engine against actor on the same tokens under the same policy: damaged weights would show here first.
        metrics["rollout_logprob_diff"] = float(fresh.mean()) if fresh.size else 0.0
        metrics["rollout_logprob_diff_max"] = float(fresh.max(initial=0.0))
    if (stale := drift[mask & (age > 0)]).size:
        metrics["stale_logprob_diff"] = float(stale.mean())
    return metrics


class EngineMetrics:
    """Makes metrics of the engines' work, and reports an engine that is far below its peers."""

    def __init__(self, node: Callable[[int], str], note: Callable[[str, str, int], None]) -> None:
        """`node(engine)`: where an engine runs now; `note` gets a text, the kind of event, the engine."""
        self._node = node
        self._note = note
        self._streaks: dict[int, int] = {}  # engine -> steps in a row that it was far below its peers

    def step(self, number: int, loads: dict[int, EngineLoad]) -> dict[str, float]:
        """Return metrics `perf/engine/<index>/<name>`; `loads`: the engines' work in this step's rollout."""
        rates = {engine: load.tokens_per_s for engine, load in loads.items()}
        low = far_below(rates)
        self._streaks = {engine: self._streaks.get(engine, 0) + 1 for engine in low}
        for engine, peers in ((e, peers) for e, peers in low.items() if self._streaks[e] == STEPS):
            node = self._node(engine)
            self._note(
                f"step {number}: engine {engine} on {node} is far below its peers for {STEPS} steps: "
                f"{rates[engine]:.0f} tokens/s, the others' median is {peers:.0f} (perf/engine/{engine}/tokens_per_s). "
                f"Look at what else runs on {node}, and at where the engine's GPUs are: slurm-rlhf plan",
                WARNING,
                engine,
            )
        return {
            f"perf/engine/{engine}/{name}": value
            for engine, load in loads.items()
            for name, value in load.metrics().items()
        }
