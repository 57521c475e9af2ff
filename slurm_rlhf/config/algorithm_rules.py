"""Rules over the keys of the algorithm, its loss, sampling, and penalties for the end or the length of a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurm_rlhf.algorithms.registry import Algorithm
from slurm_rlhf.config.correction import corrects
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.rule import Broken, Rules, without_effect
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

TYPE, EPS_CLIP = "actor.policy_loss_type", "actor.eps_clip"
COLDEST = 0.01
"""vLLM samples at this temperature where a lower one is asked for (`vllm.sampling_params._MAX_TEMP`)."""


def algorithm_problems(config: Config) -> Iterator[str]:
    """Check what the algorithm needs."""
    try:
        algorithm = algorithm_of(config)
    except ConfigError as error:
        yield str(error)
        return
    yield from AlgorithmRules(config, algorithm).problems()


def _penalties(config: Config, algorithm: Algorithm) -> list[dict[str, Any]]:
    """List the penalties that are set, for an algorithm that does not learn from the reward, or from one above 0."""
    reward = config.reward
    proper = reward.stop_properly_penalty_coef < (1 if algorithm.needs_components else 0)
    settings = {
        f"reward.overlong_buffer_len = {reward.overlong_buffer_len}": reward.overlong_buffer_len > 0,
        f"reward.length_penalty_coef = {reward.length_penalty_coef:g}": reward.length_penalty_coef > 0,
        f"reward.stop_properly_penalty_coef = {reward.stop_properly_penalty_coef:g}": proper,
    }
    return [{"setting": name} for name, on in settings.items() if on]


class _WithAlgorithm(Rules):
    def __init__(self, config: Config, algorithm: Algorithm) -> None:
        super().__init__(config, algorithm=algorithm)
        self.algorithm = algorithm


class AlgorithmRules(_WithAlgorithm):
    """Check what the algorithm needs."""

    group = "algorithm"

    def component_twice(self) -> Broken:
        """algo.advantage.gdpo_reward_keys = {algo.advantage.gdpo_reward_keys} names a component twice: leave one out"""
        keys = self.config.algo.advantage.gdpo_reward_keys
        return self.algorithm.needs_components and len(set(keys)) < len(keys)

    def component_weights(self) -> Broken:
        """algo.advantage.gdpo_reward_weights has {weights} weights for {keys} algo.advantage.gdpo_reward_keys: name
        each component that has a weight, in the same order"""
        advantage = self.config.algo.advantage
        keys, weights = len(advantage.gdpo_reward_keys), len(advantage.gdpo_reward_weights)
        fits = weights in (0, keys) or not self.algorithm.needs_components
        return False if fits else {"weights": weights, "keys": keys}

    def weights_of_zero(self) -> Broken:
        """algo.advantage.gdpo_reward_weights are all 0, so that there is nothing to learn: weigh one component"""
        weights = self.config.algo.advantage.gdpo_reward_weights
        return self.algorithm.needs_components and bool(weights) and not any(weights)

    def penalty_of_components(self) -> Broken:
        """{setting} changes the reward, and algo.advantage.estimator = {algorithm.name} learns from its components:
        leave the key out, and have the reward function answer length as one of the components"""
        return _penalties(self.config, self.algorithm) if self.algorithm.needs_components else False

    def negative_rewards(self) -> Broken:
        """{setting} makes rewards negative, and algo.advantage.estimator = {algorithm.name} takes rewards of 0 and
        above: leave the key out"""
        if not self.algorithm.refuses_negative_rewards:
            return False
        normalised = [{"setting": "reward.normalize_enable = true"}] if self.config.reward.normalize_enable else []
        return _penalties(self.config, self.algorithm) + normalised

    def no_room_for_patterns(self) -> Broken:
        """rollout.repetition_detection_min_pattern_size = {rollout.repetition_detection_min_pattern_size} times
        rollout.repetition_detection_min_count = {rollout.repetition_detection_min_count} is more than
        rollout.max_new_tokens = {rollout.max_new_tokens}, so that no response can repeat itself: lower one of them"""
        rollout = self.config.rollout
        smallest, largest = rollout.repetition_detection_min_pattern_size, rollout.repetition_detection_max_pattern_size
        fits = largest != 0 and smallest <= largest
        return fits and smallest * rollout.repetition_detection_min_count > rollout.max_new_tokens


class LossRules(_WithAlgorithm):
    """Check the keys of the policy loss."""

    group = "loss"

    def wrong_way_round(self) -> Broken:
        """actor.eps_clip_low_high = {low:g} {high:g} is the wrong way round: the range below comes first and is the
        narrower one, write {high:g} {low:g} (a range of 1 or more below is no bound at all)"""
        low, high = self.config.actor.eps_clip_low_high if len(self.config.actor.eps_clip_low_high) == 2 else (0.0, 0.0)
        return {"low": low, "high": high} if high < low < 1 else False

    def keys_of_other_losses(self) -> Broken:
        """{problem}"""
        # The run would be another than its author thinks.
        from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

        chosen, found = POLICY_LOSSES[self.config.actor.policy_loss_type], []
        for leaf in dict.fromkeys(leaf for row in POLICY_LOSSES.values() for leaf in row.keys):
            if leaf in chosen.keys or self.algorithm.policy_loss is not None:
                continue
            name, users = f"actor.{leaf}", " and ".join(row.name for row in POLICY_LOSSES.values() if leaf in row.keys)
            own = ", set actor.eps_clip_low_high for its range" if name == EPS_CLIP and chosen.clip_range else ""
            why = f"with {TYPE} = {chosen.name}, it belongs to {users}: leave it out{own}"
            found += [{"problem": problem} for problem in without_effect(self.config, [name], why)]
        return found

    def two_aggregations(self) -> Broken:
        """algo.advantage.estimator = {algorithm.name} adds up losses by {algorithm.aggregation} and
        actor.policy_loss_type = {loss.name} by {loss.aggregation}: say which with actor.loss_agg_mode"""
        from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

        loss = POLICY_LOSSES[self.config.actor.policy_loss_type]
        usual = Algorithm.__dataclass_fields__["aggregation"].default
        if self.algorithm.policy_loss or self.config.actor.loss_agg_mode or self.algorithm.aggregation == usual:
            return False
        return {"loss": loss} if loss.aggregation not in ("", self.algorithm.aggregation) else False


class FilterRules(Rules):
    """Check the keys of dynamic sampling against each other."""

    group = "filter"

    def filter_range(self) -> Broken:
        """algo.dynamic_filtering_range takes nothing or two numbers, the lower first, got
        {algo.dynamic_filtering_range}"""
        bounds = self.config.algo.dynamic_filtering_range
        wrong = len(bounds) not in (0, 2) or (len(bounds) == 2 and not bounds[0] < bounds[1])
        return wrong and self.config.algo.dynamic_filtering_enable


class SamplingRules(Rules):
    """Check that the trainer can take the log-probs of the distribution that engines sample from."""

    def whole_vocabulary(self) -> Broken:
        """rollout.{name} = {value} would make the engine sample from a part of the vocabulary, while the trainer's
        log-probs, the ratio and the KL are over all of it, and the policy would learn from wrong ratios{unmended}:
        leave rollout.{name} at {whole}, and lower rollout.temperature, which both sides apply"""
        # With top_p or top_k the engine samples from a distribution that is cut off and scaled up, and the log-ratio of
        # every token is wrong by log Z. Evaluation may sample in any way: nothing is trained on it.
        unmended = " (algo.correction.* does not mend that: its ratios would be the wrong ones)"
        rows: list[dict[str, Any]] = [
            {"name": "top_p", "value": self.config.rollout.top_p, "whole": 1},
            {"name": "top_k", "value": self.config.rollout.top_k, "whole": -1},
        ]
        more = {"unmended": unmended if corrects(self.config) else ""}
        return [row | more for row in rows if row["value"] != row["whole"]]

    def coldest(self) -> Broken:
        """rollout.temperature = {rollout.temperature:g} is below what the engine samples at: vLLM takes {coldest}
        instead, and the trainer's log-probs would be of another distribution: use {coldest} or more"""
        return {"coldest": COLDEST} if self.config.rollout.temperature < COLDEST else False
