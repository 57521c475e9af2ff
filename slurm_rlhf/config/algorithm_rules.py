"""Rules over the keys of the algorithm, its loss, sampling, and penalties for the end or the length of a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurm_rlhf.algorithms.registry import Algorithm
from slurm_rlhf.config.correction import corrects
from slurm_rlhf.config.keys import Broken, Rules, all_keys, unused, without_effect
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

TYPE, EPS_CLIP = "actor.policy_loss_type", "actor.eps_clip"
PPO = "ppo"  # the loss that has one range for both sides
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


def _wrong_range(config: Config) -> bool:
    bounds = config.algo.dynamic_filtering_range
    return len(bounds) not in (0, 2) or (len(bounds) == 2 and not bounds[0] < bounds[1])


class _WithAlgorithm(Rules):
    def __init__(self, config: Config, algorithm: Algorithm) -> None:
        super().__init__(config, algorithm=algorithm)
        self.algorithm = algorithm


class AlgorithmRules(_WithAlgorithm):
    """Check what the algorithm needs."""

    def group_size(self) -> Broken:
        """algo.advantage.estimator = {algorithm.name} compares the responses to one prompt: it needs
        rollout.n_samples_per_prompt of at least {algorithm.min_samples_per_prompt}, got
        {rollout.n_samples_per_prompt}"""
        return self.config.rollout.n_samples_per_prompt < self.algorithm.min_samples_per_prompt

    def critic_alone(self) -> Broken:
        """critic.freezing_steps = {critic.freezing_steps} trains the critic alone at first, and
        algo.advantage.estimator = {algorithm.name} has none: leave the key out"""
        return bool(self.config.critic.freezing_steps) and not self.algorithm.needs_critic

    def no_lambda(self) -> Broken:
        """algo.advantage.lambd_critic = {algo.advantage.lambd_critic:g} is no lambda: use -1 for that of
        algo.advantage.lambd, or a number from 0 to 1"""
        return -1 < self.config.algo.advantage.lambd_critic < 0

    def lambda_of_a_critic(self) -> Broken:
        """algo.advantage.lambd_critic = {algo.advantage.lambd_critic:g} is for the returns that a critic learns, and
        algo.advantage.estimator = {algorithm.name} has none: leave the key out"""
        return self.config.algo.advantage.lambd_critic != -1 and not self.algorithm.needs_critic

    def no_division(self) -> Broken:
        """algo.advantage.no_std_norm = true leaves out a division by a standard deviation, and algo.advantage.estimator
        = {algorithm.name} has none: leave the key out"""
        divides = self.algorithm.divides_by_spread or self.algorithm.whiten
        return self.config.algo.advantage.no_std_norm and not divides

    def whitening_left_out_twice(self) -> Broken:
        """algo.advantage.no_std_norm = true keeps the mean of the whitening that algo.advantage.no_whitening = true
        leaves out whole: set one of them"""
        both = self.config.algo.advantage.no_std_norm and self.config.algo.advantage.no_whitening
        return both and self.algorithm.whiten and not self.algorithm.divides_by_spread

    def no_whitening(self) -> Broken:
        """algo.advantage.no_whitening = true leaves out the whitening of advantages, and algo.advantage.estimator =
        {algorithm.name} has none: leave the key out"""
        return self.config.algo.advantage.no_whitening and not self.algorithm.whiten

    @unused("algo.advantage.gdpo_reward_keys", "algo.advantage.gdpo_reward_weights")
    def no_components(self) -> Broken:
        """with algo.advantage.estimator = {algorithm.name}: use gdpo, or leave the key out"""
        return not self.algorithm.needs_components

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

    def components_of_a_model(self) -> Broken:
        """algo.advantage.estimator = {algorithm.name} takes several rewards for each response, and
        reward.model_name_or_path gives one: use a reward function that answers components"""
        alone = bool(self.config.reward.model_name_or_path) and not self.config.reward.sources
        return self.algorithm.needs_components and alone

    def normalised_components(self) -> Broken:
        """reward.normalize_enable = true normalises the reward, and algo.advantage.estimator = {algorithm.name} learns
        from its components, each normalised in its group: leave the key out"""
        return self.algorithm.needs_components and self.config.reward.normalize_enable

    def long_buffer(self) -> Broken:
        """reward.overlong_buffer_len = {reward.overlong_buffer_len} is more than rollout.max_new_tokens =
        {rollout.max_new_tokens}, so that even an empty response would be too long: take a part of the latter"""
        return self.config.reward.overlong_buffer_len > self.config.rollout.max_new_tokens

    @unused("reward.overlong_penalty_factor")
    def no_buffer(self) -> Broken:
        """without reward.overlong_buffer_len, the tokens over which it rises: set both, or leave it out"""
        return not self.config.reward.overlong_buffer_len

    def lengths_to_compare(self) -> Broken:
        """reward.length_penalty_coef = {reward.length_penalty_coef:g} compares the lengths of the responses to one
        prompt: it needs rollout.n_samples_per_prompt of at least 2"""
        return bool(self.config.reward.length_penalty_coef) and self.config.rollout.n_samples_per_prompt < 2

    def penalty_without_training(self) -> Broken:
        """reward.stop_properly_penalty_coef = {reward.stop_properly_penalty_coef:g} is a penalty for responses that
        were cut off, and rollout.mask_truncated = true does not train on them, so it would only shift the others'
        baseline: set one of the two"""
        return self.config.reward.stop_properly_penalty_coef < 1 and self.config.rollout.mask_truncated

    def penalty_that_pays(self) -> Broken:
        """reward.stop_properly_penalty_coef = {reward.stop_properly_penalty_coef:g} brings rewards nearer to 0, and
        with reward.normalize_enable = true that is the mean, so bad responses that were cut off would gain by it: use a
        coefficient below 0, which replaces the reward"""
        return 0 <= self.config.reward.stop_properly_penalty_coef < 1 and self.config.reward.normalize_enable

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

    @unused("rollout.repetition_detection_min_pattern_size", "rollout.repetition_detection_min_count")
    def no_repetition(self) -> Broken:
        """without rollout.repetition_detection_max_pattern_size: set both, or leave it out"""
        return not self.config.rollout.repetition_detection_max_pattern_size

    def no_pattern(self) -> Broken:
        """rollout.repetition_detection_min_pattern_size = {rollout.repetition_detection_min_pattern_size} is above
        rollout.repetition_detection_max_pattern_size = {rollout.repetition_detection_max_pattern_size}: no pattern is
        both"""
        largest = self.config.rollout.repetition_detection_max_pattern_size
        return largest != 0 and self.config.rollout.repetition_detection_min_pattern_size > largest

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

    def dual_clip(self) -> Broken:
        """actor.dual_clip = {actor.dual_clip:g} would cut off tokens that did not become likelier: it bounds a ratio,
        use a number above 1 (3 is usual), or 0 to switch it off"""
        return 0 < self.config.actor.dual_clip <= 1

    def wrong_way_round(self) -> Broken:
        """actor.eps_clip_low_high = {low:g} {high:g} is the wrong way round: the range below comes first and is the
        narrower one, write {high:g} {low:g} (a range of 1 or more below is no bound at all)"""
        low, high = self.config.actor.eps_clip_low_high if len(self.config.actor.eps_clip_low_high) == 2 else (0.0, 0.0)
        return {"low": low, "high": high} if high < low < 1 else False

    @unused(EPS_CLIP)
    def two_ranges(self) -> Broken:
        """with actor.eps_clip_low_high = {sides}, which says how far on either side: leave one of them out"""
        sides = " ".join(f"{side:g}" for side in self.config.actor.eps_clip_low_high)
        return {"sides": sides} if sides and self.config.actor.policy_loss_type == PPO else False

    def kl_of_weight_zero(self) -> Broken:
        """algo.kl.use_loss = true adds a KL term of weight algo.kl.init_coef = 0, and no reference is started: set
        algo.kl.init_coef above 0, or leave use_loss out"""
        return self.config.algo.kl.use_loss and not self.config.algo.kl.init_coef

    @unused("algo.kl.horizon")
    def no_kl_target(self) -> Broken:
        """without algo.kl.target, which it says how fast to reach: set algo.kl.target, or leave the key out"""
        return not self.config.algo.kl.target

    def kl_of_noise(self) -> Broken:
        """algo.kl.use_loss = true with algo.kl.estimator = k1 would add noise alone, because the mean gradient of k1 is
        zero: set algo.kl.estimator to k2 or k3+, whose gradient is that of the KL divergence, or to k3"""
        return self.config.algo.kl.use_loss and self.config.algo.kl.estimator == "k1"

    def two_losses(self) -> Broken:
        """algo.advantage.estimator = {algorithm.name} brings a policy loss of its own, which actor.policy_loss_type =
        {actor.policy_loss_type} would replace: leave actor.policy_loss_type out, or choose an algorithm without one"""
        return self.algorithm.policy_loss is not None and self.config.actor.policy_loss_type != all_keys()[TYPE].default

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

    def filter_range(self) -> Broken:
        """algo.dynamic_filtering_range takes nothing or two numbers, the lower first, got
        {algo.dynamic_filtering_range}"""
        return _wrong_range(self.config)

    @unused("rollout.vllm_generate_batch_size", "algo.dynamic_filtering_max_tries")
    def unfiltered(self) -> Broken:
        """while algo.dynamic_filtering_enable is false, because nothing is sampled that is not trained on: switch that
        on, or leave the key out"""
        return not self.config.algo.dynamic_filtering_enable

    @unused("algo.dynamic_filtering_range")
    def unfiltered_range(self) -> Broken:
        """while algo.dynamic_filtering_enable is false, because nothing is sampled that is not trained on: switch that
        on, or leave the key out"""
        return not (self.config.algo.dynamic_filtering_enable or _wrong_range(self.config))

    def filter_of_single_responses(self) -> Broken:
        """algo.dynamic_filtering_enable compares the responses to one prompt, and with rollout.n_samples_per_prompt = 1
        it would drop every prompt: use 2 or more, or switch it off"""
        return self.config.algo.dynamic_filtering_enable and self.config.rollout.n_samples_per_prompt == 1

    def too_few_at_once(self) -> Broken:
        """rollout.vllm_generate_batch_size = {rollout.vllm_generate_batch_size} is less than rollout.batch_size =
        {rollout.batch_size}, so not even a batch of which nothing is dropped would become full: use at least as many,
        or 0"""
        rollout = self.config.rollout
        return self.config.algo.dynamic_filtering_enable and 0 < rollout.vllm_generate_batch_size < rollout.batch_size

    def filter_of_components(self) -> Broken:
        """algo.dynamic_filtering_enable drops groups whose rewards are equal, and algo.advantage.estimator = gdpo
        learns from components that may differ there: leave the filter out, which gives such groups a part of the batch,
        or use group_norm"""
        return self.config.algo.dynamic_filtering_enable and self.config.algo.advantage.estimator == "gdpo"

    @unused("rollout.vllm_generate_batch_size")
    def filter_ahead(self) -> Broken:
        """with vllm.sync_mode = inflight, which samples ahead as far as train.async_queue_size allows: leave the key
        out"""
        return self.config.algo.dynamic_filtering_enable and self.config.vllm.sync_mode == "inflight"

    def filter_of_a_reward_model(self) -> Broken:
        """algo.dynamic_filtering_enable judges each prompt while others are sampled, and reward.model_name_or_path
        scores whole batches and hardly ever gives two equal rewards: use a reward function (reward.remote_url), or
        switch it off"""
        return self.config.algo.dynamic_filtering_enable and bool(self.config.reward.model_name_or_path)


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
