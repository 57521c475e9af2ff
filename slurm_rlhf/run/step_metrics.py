"""Metrics of a step: of what was sampled, of what training answered, and of what the engines did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from slurm_rlhf.algorithms.policy_distance import ages
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.eval.verdicts import constant_share
from slurm_rlhf.observe.events import WARNING
from slurm_rlhf.records import F32, REPETITION, STOP, EngineLoad, Experience, Trajectory
from slurm_rlhf.rewards.values import Rewards

SHARE = 0.5
"""An engine below this share of the median of its peers counts as far below them."""
STEPS = 2
"""Number of such steps in a row after which the engine is reported: a single hiccup is not."""


def far_below(rates: Mapping[int, float]) -> dict[int, float]:
    """Map each engine below `SHARE` of the median rate of all other engines to that median.

    `rates`: engine -> tokens per second while it had requests; engines that had none (rate 0) are left
    out. With two engines the peers' median is the other one's rate, so one slow engine of two is found.
    """
    ordered = sorted((rate, engine) for engine, rate in rates.items() if rate > 0)
    if len(ordered) < 2:
        return {}
    found = {}
    for place, (rate, engine) in enumerate(ordered):
        peers = median(other for other, _ in [*ordered[:place], *ordered[place + 1 :]])
        if rate < SHARE * peers:
            found[engine] = peers
    return found


class Stragglers:
    """Remember for how many steps in a row each engine was far below its peers."""

    def __init__(self) -> None:
        self._streaks: dict[int, int] = {}
        self.named: set[int] = set()
        """Engines that are known to be slow; an engine leaves after one step back among its peers."""

    def step(self, rates: Mapping[int, float]) -> tuple[dict[int, float], list[int]]:
        """Take the rates of a step; return ({newly slow engine -> median of its peers}, engines that are back)."""
        low = far_below(rates)
        back = sorted(engine for engine in self.named if rates.get(engine, 0.0) > 0 and engine not in low)
        self.named -= set(back)
        self._streaks = {engine: self._streaks.get(engine, 0) + 1 for engine in low}
        fresh = {e: peers for e, peers in low.items() if self._streaks[e] >= STEPS and e not in self.named}
        self.named |= set(fresh)
        return fresh, back


PER_STEP = ("lr", "grad_norm", "loss_scale", "skipped_steps")
"""Answers that are one number for the whole optimizer step on every rank, and not a sum over a rank's tokens."""

ADDED = ("nll_loss",)
"""Answers whose sum over the ranks is the number of the whole optimizer step."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Holds what one optimizer step of a role answered."""

    role: str
    tokens: float  # of all ranks
    answers: list[dict[str, float]]  # of each rank
    rows: list[int] = field(default_factory=list)  # of the batch: what it trained on
    logprobs: F32 | None = None  # of these rows, from before the step, where the actor computed none before the update


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
        "response_length": float(np.mean(experience.response_lens)),
        "response_tokens": float(np.sum(experience.response_lens)),
        "truncated": float(np.mean([t.finish_reason != STOP for t in trajectories])),
        "reward_constant": constant_share(compared, config.rollout.n_samples_per_prompt),
    }
    if config.rollout.repetition_detection_max_pattern_size:
        metrics["repetition"] = float(np.mean([t.finish_reason == REPETITION for t in trajectories]))
    if rewards.scores is not None:
        metrics["accuracy"] = float(np.mean(rewards.scores))
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


def update_metrics(steps: list[Trained]) -> dict[str, float]:
    """Average over optimizer steps and their tokens; `first_ratio` and `first_approx_kl` are of the actor's first step.

    In that step the actor still has the weights of the old log-probs.
    Steps that were skipped are counted; they have no `grad_norm`, and what is not finite in them is left out.
    """
    found: dict[str, list[float]] = {}
    usable = [step for step in steps if not _spoiled(step)]
    for step in steps:
        for name in step.answers[0]:
            if name not in PER_STEP and step not in usable:
                continue
            if name in PER_STEP:
                found.setdefault(f"{step.role}_{name}", []).append(step.answers[0][name])
            elif name in ADDED:
                found.setdefault(name, []).append(sum(answer[name] for answer in step.answers))
            else:
                found.setdefault(name, []).append(_per_token(step, name))
    first = next((step for step in usable if step.role == "actor"), None)
    metrics = {
        name: float(np.sum(values) if name.endswith("_skipped_steps") else np.mean(values))
        for name, values in found.items()
    }
    for name in ("ratio", "approx_kl"):
        if first and name in first.answers[0]:  # a loss of the user's may have other metrics
            metrics[f"first_{name}"] = _per_token(first, name)
    return metrics


def first_pass(steps: list[Trained]) -> tuple[list[int], F32] | None:
    """Find the actor's first step whose own pass is known and was of use: its rows of the batch, their log-probs."""
    known = ((step.rows, step.logprobs) for step in steps if step.logprobs is not None and not _spoiled(step))
    return next(known, None)


def _spoiled(step: Trained) -> bool:
    """Tell whether a step was skipped because its loss was not finite: its other numbers are of no use either."""
    answers = [value for answer in step.answers for value in answer.values()]
    return step.answers[0].get("skipped_steps", 0.0) > 0 and not np.isfinite(answers).all()


def skip_warning(metrics: dict[str, float]) -> str:
    """Tell of optimizer steps that were skipped because loss or gradient was not finite; empty: none was."""
    skipped = {role: int(metrics.get(f"{role}_skipped_steps", 0)) for role in ("actor", "critic")}
    told = " and ".join(f"{count} of the {role}" for role, count in skipped.items() if count)
    return (
        f"optimizer steps skipped, because loss or gradient was not finite: {told}. After train.max_skipped_steps in a "
        "row the run ends. Usually: a learning rate that is too high, or rewards out of range (reward.clip_range)"
        if told
        else ""
    )


def _per_token(step: Trained, name: str) -> float:
    return sum(answer[name] for answer in step.answers) / max(step.tokens, 1.0)


class EngineMetrics:
    """Says what the engines did in a step: as metrics, and in words where one is far below its peers."""

    def __init__(self, node: Callable[[int], str], note: Callable[[str, str, int], None]) -> None:
        """`node(engine)`: where an engine runs now; `note` tells the user: text, kind of event ("": none), engine."""
        self._node = node
        self._note = note
        self._stragglers = Stragglers()

    def step(self, number: int, loads: dict[int, EngineLoad]) -> dict[str, float]:
        """Answer metrics `perf/engine/<index>/<name>`; `loads` are of this step's rollout."""
        rates = {engine: load.tokens_per_s for engine, load in loads.items()}
        fresh, back = self._stragglers.step(rates)
        for engine, peers in fresh.items():
            node = self._node(engine)
            self._note(
                f"step {number}: engine {engine} on {node} is far below its peers for {STEPS} steps: "
                f"{rates[engine]:.0f} tokens/s, the others' median is {peers:.0f} (perf/engine/{engine}/tokens_per_s). "
                f"Look at what else runs on {node}, and at where the engine's GPUs are: slurm-rlhf plan",
                WARNING,
                engine,
            )
        for engine in back:
            self._note(
                f"step {number}: engine {engine} on {self._node(engine)} is back among its peers, "
                f"{rates[engine]:.0f} tokens/s",
                "",
                engine,
            )
        return {
            f"perf/engine/{engine}/{name}": value
            for engine, load in loads.items()
            for name, value in load.metrics().items()
        }
