"""The algorithm: one training step of PPO, from prompts to new weights in the actor.

Rollout, reward, log-probs and values, advantages, several passes of updates. Sources: Schulman et al.,
Proximal Policy Optimization (2017); Ouyang et al., Training language models to follow instructions (2022).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurm_rlhf.algorithms.advantages import estimate
from slurm_rlhf.algorithms.aggregation import loss_weights
from slurm_rlhf.algorithms.batching import Shard, assemble, mini_batches, shards
from slurm_rlhf.algorithms.kl import KLController, approx_kl
from slurm_rlhf.algorithms.packed import response_sums
from slurm_rlhf.algorithms.registry import AdvantageInputs, Algorithm
from slurm_rlhf.algorithms.reward_scale import RewardScale, clipped_share
from slurm_rlhf.algorithms.staleness import ages, staleness
from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.handles import RoleHandle, gather
from slurm_rlhf.controller.batches import Batch
from slurm_rlhf.controller.dispatch import Generation
from slurm_rlhf.controller.verdicts import constant_share
from slurm_rlhf.observe.timing import Phases
from slurm_rlhf.records import F32, Experience, Prompt, Sampling, Trajectory, pack
from slurm_rlhf.rewards.model import Scoring
from slurm_rlhf.rewards.values import Rewards

Metrics = dict[str, float]


@dataclass(slots=True)
class PPO:
    """The conductor's half of a step; every tensor is computed by a role."""

    config: Config
    algorithm: Algorithm
    roles: dict[str, RoleHandle]
    generation: Generation
    reward: Scoring
    kl: KLController
    phases: Phases
    scale: RewardScale | None = None  # reward.normalize_enable

    def collect(self, batch: Batch, version: int) -> tuple[Experience, Metrics]:
        """Score a step's batch with the actor at policy `version`: what the step needs before anything changes.

        It may be dropped and done again: the same numbers come out.

        The ratio of the update is taken to the actor's own log-probs at `version`, whichever policies sampled the
        tokens; that these may be older ones (vllm.sync_mode = inflight) is bounded, and not corrected for. So what is
        clipped is the distance from the newest policy. Source: Hilton et al., Batch size-invariance for policy
        optimization (2022), there with the weight of the proximal to the behaviour policy, which is 1 here.
        """
        rewards, experience = self._score(batch.step, batch.prompts, batch.trajectories)
        with self.phases("advantages"):
            metrics = self._advantages(experience)
        return experience, metrics | self._sample_metrics(batch.trajectories, rewards, experience, version)

    def update(self, number: int, experience: Experience, metrics: Metrics) -> Metrics:
        """Train actor and critic on a step's experience; `metrics` are those of `collect`."""
        with self.phases("update"):
            trained = self._update(number, experience)
        self.kl.update(metrics["kl"], len(experience))
        if self.scale is not None:
            self.scale = self.scale.with_batch(experience.rewards)
        return metrics | trained

    def sampling(self) -> Sampling:
        """How training responses are sampled."""
        r = self.config.rollout
        return Sampling(r.n_samples_per_prompt, r.temperature, r.top_p, r.top_k, r.max_new_tokens, list(r.stop))

    def _score(self, number: int, prompts: list[Prompt], trajectories: list[Trajectory]) -> tuple[Rewards, Experience]:
        """Rewards of the user's function or the reward model, while the others compute log-probs and values."""
        experience = pack(trajectories, [0.0] * len(trajectories))
        owners = [prompt for prompt in prompts for _ in range(self.config.rollout.n_samples_per_prompt)]
        with self.phases("forward"):
            scored = self.reward.begin(owners, trajectories, number)
            if "reward" in self.roles:
                self._take_turns([scored])
            self._forward(experience)
        with self.phases("reward"):
            rewards = self.reward.wait(scored, len(trajectories))
        values = np.asarray(rewards.rewards, dtype=np.float32)
        if self.config.reward.shuffle:
            values = np.random.default_rng([self.config.train.seed, number]).permutation(values)
        experience.rewards = values
        return rewards, experience

    def _forward(self, experience: Experience) -> None:
        """Fill the columns `logprobs`, `ref_logprobs` and `values`; all roles at once."""
        wanted = [
            ("actor", "logprobs", "logprobs"),
            ("reference", "logprobs", "ref_logprobs"),
            ("critic", "values", "values"),
        ]
        running: list[tuple[str, list[Shard], list[Future[Any]], str]] = []
        for role, method, column in wanted:
            if role in self.roles:
                handle = self.roles[role]
                parts = shards(experience, handle.world, self.config.train.forward_tokens)
                calls = [handle.call(rank, method, **part.to_wire()) for rank, part in enumerate(parts)]
                self._take_turns(calls)
                running.append((method, parts, calls, column))
        for method, parts, calls, column in running:
            experience.columns[column] = assemble(experience, parts, [answer[method] for answer in gather(calls)])

    def _take_turns(self, calls: list[Future[Any]]) -> None:
        """Where all roles share their accelerators, one computes at a time: their peaks of memory do not add up."""
        if self.config.train.colocate_all:
            gather(calls)

    def _advantages(self, experience: Experience) -> Metrics:
        config, columns, offsets = self.config.algo, experience.columns, experience.action_offsets
        kl: F32 | None = None
        mean_kl = 0.0
        if "ref_logprobs" in columns:
            kl = approx_kl(columns["logprobs"], columns["ref_logprobs"], config.kl.estimator)
            mean_kl = float(response_sums(kl, experience.action_mask, offsets).mean())
        rewards = experience.rewards
        if self.scale is not None:
            rewards = self.scale.with_batch(rewards).normalize(rewards)
        columns |= estimate(
            self.algorithm,
            AdvantageInputs(
                rewards=rewards,
                kl=kl,
                values=columns.get("values"),
                action_mask=experience.action_mask,
                offsets=offsets,
                groups=np.arange(len(experience)) // self.config.rollout.n_samples_per_prompt,
                kl_coef=self.kl.coef,
                clip_range=self.config.reward.clip_range,
                gamma=config.advantage.gamma,
                lambd=config.advantage.lambd,
            ),
            no_whitening=config.advantage.no_whitening,
        )
        mask = experience.action_mask
        metrics = {
            "kl": mean_kl,
            "kl_coef": self.kl.coef,
            "reward_clipped": clipped_share(rewards, self.config.reward.clip_range),
        }
        for name, column in (("value", "values"), ("return", "returns")):
            if column in columns:
                metrics[name] = float(columns[column][mask].mean()) if mask.any() else 0.0
        return metrics

    def _update(self, number: int, experience: Experience) -> Metrics:
        """Pass mini-batches through actor and critic `train.max_epochs` times; the two train side by side."""
        train, longest = self.config.train, self.config.rollout.max_new_tokens
        frozen = number <= self.config.critic.freezing_steps
        trained = [role for role in ("actor", "critic") if role in self.roles and not (frozen and role == "actor")]
        pending: list[tuple[str, float, list[Future[Any]]]] = []
        for epoch in range(train.max_epochs):
            for rows in mini_batches(len(experience), train.batch_size, train.seed * 1_000_003 + number, epoch):
                batch = experience.select(rows)
                # Every micro-batch on every rank divides by numbers of the whole optimizer step: an exact mean.
                tokens = float(batch.action_mask.sum())
                mode = self.algorithm.aggregation
                weighed, weights = loss_weights(mode, batch.action_mask, batch.action_offsets, longest)
                if weights is not None:
                    batch.columns["loss_weights"] = weights
                for role in trained:
                    handle = self.roles[role]
                    parts = shards(batch, handle.world, train.max_tokens_per_gpu)
                    denominator = weighed if role == "actor" else tokens
                    calls = [
                        handle.call(rank, "train_step", denominator=denominator, **part.to_wire())
                        for rank, part in enumerate(parts)
                    ]
                    self._take_turns(calls)
                    pending.append((role, tokens, calls))
        finished = [(role, tokens, gather(calls)) for role, tokens, calls in pending]
        return _means(finished) | _first_of_actor(finished)

    def _sample_metrics(
        self, trajectories: list[Trajectory], rewards: Rewards, experience: Experience, version: int
    ) -> Metrics:
        mask, columns = experience.action_mask, experience.columns
        drift = np.abs(columns["rollout_logprobs"] - columns["logprobs"])
        metrics = {
            "reward": float(np.mean(rewards.rewards)),
            "response_length": float(np.mean(experience.response_lens)),
            "response_tokens": float(np.sum(experience.response_lens)),
            "truncated": float(np.mean([t.finish_reason == "length" for t in trajectories])),
            "reward_constant": constant_share(experience.rewards, self.config.rollout.n_samples_per_prompt),
        }
        age = ages(trajectories, version)
        fresh = drift[mask & (age == 0)]
        ahead = self.config.vllm.sync_mode == "inflight"
        if fresh.size or not ahead:
            # Engine against actor on the same tokens under the same policy: damaged weights would show here first.
            metrics["rollout_logprob_diff"] = float(fresh.mean()) if fresh.size else 0.0
            metrics["rollout_logprob_diff_max"] = float(fresh.max(initial=0.0))
        if ahead:
            metrics |= staleness(trajectories, age, mask, drift)
        if rewards.scores is not None:
            metrics["accuracy"] = float(np.mean(rewards.scores))
        return metrics | {f"reward/{name}": float(np.mean(values)) for name, values in rewards.extra_logs.items()}


# What is one number for the whole optimizer step on every rank, and not a sum over a rank's tokens.
PER_STEP = ("lr", "grad_norm")


def _means(finished: list[tuple[str, float, list[dict[str, float]]]]) -> Metrics:
    """Mean over the optimizer steps of (role, tokens, answers of the ranks); token sums become means over tokens."""
    steps: dict[str, list[float]] = {}
    for role, tokens, answers in finished:
        for name in answers[0]:
            if name in PER_STEP:
                steps.setdefault(f"{role}_{name}", []).append(answers[0][name])
            else:
                steps.setdefault(name, []).append(sum(answer[name] for answer in answers) / max(tokens, 1.0))
    return {name: float(np.mean(values)) for name, values in steps.items()}


def _first_of_actor(finished: list[tuple[str, float, list[dict[str, float]]]]) -> Metrics:
    """`ratio` and `approx_kl` of the actor's first optimizer step alone: its weights are those of the old log-probs."""
    for role, tokens, answers in finished:
        if role == "actor":
            return {
                f"first_{name}": sum(answer[name] for answer in answers) / max(tokens, 1.0)
                for name in ("ratio", "approx_kl")
                if name in answers[0]  # a loss of the user's may have other metrics
            }
    return {}
