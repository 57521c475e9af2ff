"""Rules over the keys of the algorithm, its loss, sampling, and penalties for the end or the length of a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurm_rlhf.algorithms.registry import Algorithm
from slurm_rlhf.config.correction import corrects
from slurm_rlhf.config.keys import Broken, Rules, all_keys, without_effect
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

TYPE, EPS_CLIP = "actor.policy_loss_type", "actor.eps_clip"
PPO = "ppo"  # the loss that has one range for both sides
COLDEST = 0.01
"""vLLM samples at this temperature where a lower one is asked for (`vllm.sampling_params._MAX_TEMP`)."""

ALGORITHM, LOSS, AGGREGATION, FILTER, SAMPLING = (Rules() for _ in range(5))


def algorithm_problems(config: Config) -> Iterator[str]:
    """Check what the algorithm needs."""
    try:
        algorithm = algorithm_of(config)
    except ConfigError as error:
        yield str(error)
        return
    yield from ALGORITHM.problems(config, algorithm=algorithm)


def loss_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of the policy loss. The name of the algorithm has to be a valid one."""
    algorithm = algorithm_of(config)
    yield from LOSS.problems(config, algorithm=algorithm)
    if algorithm.policy_loss is None:
        yield from _keys_of_other_losses(config)
        yield from AGGREGATION.problems(config, algorithm=algorithm)


@ALGORITHM.add()
def _group_size(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.estimator = {algorithm.name} compares the responses to one prompt: it needs
    rollout.n_samples_per_prompt of at least {algorithm.min_samples_per_prompt}, got {rollout.n_samples_per_prompt}"""
    return config.rollout.n_samples_per_prompt < algorithm.min_samples_per_prompt


@ALGORITHM.add()
def _critic_alone(config: Config, algorithm: Algorithm) -> Broken:
    """critic.freezing_steps = {critic.freezing_steps} trains the critic alone at first, and algo.advantage.estimator =
    {algorithm.name} has none: leave the key out"""
    return bool(config.critic.freezing_steps) and not algorithm.needs_critic


@ALGORITHM.add()
def _lambda(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.lambd_critic = {algo.advantage.lambd_critic:g} is no lambda: use -1 for that of
    algo.advantage.lambd, or a number from 0 to 1"""
    return -1 < config.algo.advantage.lambd_critic < 0


@ALGORITHM.add()
def _lambda_of_a_critic(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.lambd_critic = {algo.advantage.lambd_critic:g} is for the returns that a critic learns, and
    algo.advantage.estimator = {algorithm.name} has none: leave the key out"""
    return config.algo.advantage.lambd_critic != -1 and not algorithm.needs_critic


@ALGORITHM.add()
def _no_division(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.no_std_norm = true leaves out a division by a standard deviation, and algo.advantage.estimator =
    {algorithm.name} has none: leave the key out"""
    return config.algo.advantage.no_std_norm and not (algorithm.divides_by_spread or algorithm.whiten)


@ALGORITHM.add()
def _whitening_left_out_twice(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.no_std_norm = true keeps the mean of the whitening that algo.advantage.no_whitening = true leaves
    out whole: set one of them"""
    both = config.algo.advantage.no_std_norm and config.algo.advantage.no_whitening
    return both and algorithm.whiten and not algorithm.divides_by_spread


@ALGORITHM.add()
def _no_whitening(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.no_whitening = true leaves out the whitening of advantages, and algo.advantage.estimator =
    {algorithm.name} has none: leave the key out"""
    return config.algo.advantage.no_whitening and not algorithm.whiten


@ALGORITHM.add("algo.advantage.gdpo_reward_keys", "algo.advantage.gdpo_reward_weights")
def _no_components(config: Config, algorithm: Algorithm) -> Broken:
    """with algo.advantage.estimator = {algorithm.name}: use gdpo, or leave the key out"""
    return not algorithm.needs_components


@ALGORITHM.add()
def _component_twice(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.gdpo_reward_keys = {algo.advantage.gdpo_reward_keys} names a component twice: leave one out"""
    keys = config.algo.advantage.gdpo_reward_keys
    return algorithm.needs_components and len(set(keys)) < len(keys)


@ALGORITHM.add()
def _component_weights(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.gdpo_reward_weights has {weights} weights for {keys} algo.advantage.gdpo_reward_keys: name each
    component that has a weight, in the same order"""
    keys, weights = len(config.algo.advantage.gdpo_reward_keys), len(config.algo.advantage.gdpo_reward_weights)
    return {"weights": weights, "keys": keys} if algorithm.needs_components and weights not in (0, keys) else False


@ALGORITHM.add()
def _weights_of_zero(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.gdpo_reward_weights are all 0, so that there is nothing to learn: weigh one component"""
    weights = config.algo.advantage.gdpo_reward_weights
    return algorithm.needs_components and bool(weights) and not any(weights)


@ALGORITHM.add()
def _components_of_a_model(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.estimator = {algorithm.name} takes several rewards for each response, and
    reward.model_name_or_path gives one: use a reward function that answers components"""
    return algorithm.needs_components and bool(config.reward.model_name_or_path)


@ALGORITHM.add()
def _normalised_components(config: Config, algorithm: Algorithm) -> Broken:
    """reward.normalize_enable = true normalises the reward, and algo.advantage.estimator = {algorithm.name} learns from
    its components, each normalised in its group: leave the key out"""
    return algorithm.needs_components and config.reward.normalize_enable


@ALGORITHM.add()
def _long_buffer(config: Config, algorithm: Algorithm) -> Broken:
    """reward.overlong_buffer_len = {reward.overlong_buffer_len} is more than rollout.max_new_tokens =
    {rollout.max_new_tokens}, so that even an empty response would be too long: take a part of the latter"""
    return config.reward.overlong_buffer_len > config.rollout.max_new_tokens


@ALGORITHM.add("reward.overlong_penalty_factor")
def _no_buffer(config: Config, algorithm: Algorithm) -> Broken:
    """without reward.overlong_buffer_len, the tokens over which it rises: set both, or leave it out"""
    return not config.reward.overlong_buffer_len


@ALGORITHM.add()
def _lengths_to_compare(config: Config, algorithm: Algorithm) -> Broken:
    """reward.length_penalty_coef = {reward.length_penalty_coef:g} compares the lengths of the responses to one prompt:
    it needs rollout.n_samples_per_prompt of at least 2"""
    return bool(config.reward.length_penalty_coef) and config.rollout.n_samples_per_prompt < 2


@ALGORITHM.add()
def _penalty_without_training(config: Config, algorithm: Algorithm) -> Broken:
    """reward.stop_properly_penalty_coef = {reward.stop_properly_penalty_coef:g} is a penalty for responses that were
    cut off, and rollout.mask_truncated = true does not train on them, so it would only shift the others' baseline: set
    one of the two"""
    return config.reward.stop_properly_penalty_coef < 1 and config.rollout.mask_truncated


@ALGORITHM.add()
def _penalty_that_pays(config: Config, algorithm: Algorithm) -> Broken:
    """reward.stop_properly_penalty_coef = {reward.stop_properly_penalty_coef:g} brings rewards nearer to 0, and with
    reward.normalize_enable = true that is the mean, so bad responses that were cut off would gain by it: use a
    coefficient below 0, which replaces the reward"""
    return 0 <= config.reward.stop_properly_penalty_coef < 1 and config.reward.normalize_enable


@ALGORITHM.add()
def _penalty_of_components(config: Config, algorithm: Algorithm) -> Broken:
    """{setting} changes the reward, and algo.advantage.estimator = {algorithm.name} learns from its components: leave
    the key out, and have the reward function answer length as one of the components"""
    return _penalties(config, algorithm) if algorithm.needs_components else False


@ALGORITHM.add()
def _negative_rewards(config: Config, algorithm: Algorithm) -> Broken:
    """{setting} makes rewards negative, and algo.advantage.estimator = {algorithm.name} takes rewards of 0 and above:
    leave the key out"""
    if not algorithm.refuses_negative_rewards:
        return False
    normalised = [{"setting": "reward.normalize_enable = true"}] if config.reward.normalize_enable else []
    return _penalties(config, algorithm) + normalised


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


@ALGORITHM.add("rollout.repetition_detection_min_pattern_size", "rollout.repetition_detection_min_count")
def _no_repetition(config: Config, algorithm: Algorithm) -> Broken:
    """without rollout.repetition_detection_max_pattern_size: set both, or leave it out"""
    return not config.rollout.repetition_detection_max_pattern_size


@ALGORITHM.add()
def _no_pattern(config: Config, algorithm: Algorithm) -> Broken:
    """rollout.repetition_detection_min_pattern_size = {rollout.repetition_detection_min_pattern_size} is above
    rollout.repetition_detection_max_pattern_size = {rollout.repetition_detection_max_pattern_size}: no pattern is
    both"""
    largest = config.rollout.repetition_detection_max_pattern_size
    return largest != 0 and config.rollout.repetition_detection_min_pattern_size > largest


@ALGORITHM.add()
def _no_room_for_patterns(config: Config, algorithm: Algorithm) -> Broken:
    """rollout.repetition_detection_min_pattern_size = {rollout.repetition_detection_min_pattern_size} times
    rollout.repetition_detection_min_count = {rollout.repetition_detection_min_count} is more than
    rollout.max_new_tokens = {rollout.max_new_tokens}, so that no response can repeat itself: lower one of them"""
    rollout = config.rollout
    smallest, largest = rollout.repetition_detection_min_pattern_size, rollout.repetition_detection_max_pattern_size
    fits = largest != 0 and smallest <= largest
    return fits and smallest * rollout.repetition_detection_min_count > rollout.max_new_tokens


@LOSS.add()
def _dual_clip(config: Config, algorithm: Algorithm) -> Broken:
    """actor.dual_clip = {actor.dual_clip:g} would cut off tokens that did not become likelier: it bounds a ratio, use a
    number above 1 (3 is usual), or 0 to switch it off"""
    return 0 < config.actor.dual_clip <= 1


@LOSS.add()
def _wrong_way_round(config: Config, algorithm: Algorithm) -> Broken:
    """actor.eps_clip_low_high = {low:g} {high:g} is the wrong way round: the range below comes first and is the
    narrower one, write {high:g} {low:g} (a range of 1 or more below is no bound at all)"""
    low, high = config.actor.eps_clip_low_high if len(config.actor.eps_clip_low_high) == 2 else (0.0, 0.0)
    return {"low": low, "high": high} if high < low < 1 else False


@LOSS.add(EPS_CLIP)
def _two_ranges(config: Config, algorithm: Algorithm) -> Broken:
    """beside actor.eps_clip_low_high = {sides}, which says how far on either side: leave one of them out"""
    sides = " ".join(f"{side:g}" for side in config.actor.eps_clip_low_high)
    return {"sides": sides} if sides and config.actor.policy_loss_type == PPO else False


@LOSS.add()
def _kl_of_weight_zero(config: Config, algorithm: Algorithm) -> Broken:
    """algo.kl.use_loss = true adds a KL term of weight algo.kl.init_coef = 0, and no reference is started: set
    algo.kl.init_coef above 0, or leave use_loss out"""
    return config.algo.kl.use_loss and not config.algo.kl.init_coef


@LOSS.add("algo.kl.horizon")
def _no_kl_target(config: Config, algorithm: Algorithm) -> Broken:
    """without algo.kl.target, which it says how fast to reach: set algo.kl.target, or leave the key out"""
    return not config.algo.kl.target


@LOSS.add()
def _kl_of_noise(config: Config, algorithm: Algorithm) -> Broken:
    """algo.kl.use_loss = true with algo.kl.estimator = k1 would add noise alone, because the mean gradient of k1 is
    zero: set algo.kl.estimator to k2 or k3+, whose gradient is that of the KL divergence, or to k3"""
    return config.algo.kl.use_loss and config.algo.kl.estimator == "k1"


@LOSS.add()
def _two_losses(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.estimator = {algorithm.name} brings a policy loss of its own, which actor.policy_loss_type =
    {actor.policy_loss_type} would replace: leave actor.policy_loss_type out, or choose an algorithm without one"""
    return algorithm.policy_loss is not None and config.actor.policy_loss_type != all_keys()[TYPE].default


def _keys_of_other_losses(config: Config) -> Iterator[str]:
    """Find keys that were set for another policy loss: the run would be another than its author thinks."""
    from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

    chosen = POLICY_LOSSES[config.actor.policy_loss_type]
    for leaf in dict.fromkeys(leaf for row in POLICY_LOSSES.values() for leaf in row.keys):
        if leaf in chosen.keys:
            continue
        name, users = f"actor.{leaf}", " and ".join(row.name for row in POLICY_LOSSES.values() if leaf in row.keys)
        own = ", set actor.eps_clip_low_high for its range" if name == EPS_CLIP and chosen.clip_range else ""
        why = f"with {TYPE} = {chosen.name}, it belongs to {users}: leave it out{own}"
        yield from without_effect(config, [name], why)


@AGGREGATION.add()
def _two_aggregations(config: Config, algorithm: Algorithm) -> Broken:
    """algo.advantage.estimator = {algorithm.name} adds up losses by {algorithm.aggregation} and actor.policy_loss_type
    = {loss.name} by {loss.aggregation}: say which with actor.loss_agg_mode"""
    from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

    loss, usual = POLICY_LOSSES[config.actor.policy_loss_type], Algorithm.__dataclass_fields__["aggregation"].default
    if config.actor.loss_agg_mode or algorithm.aggregation == usual:
        return False
    return {"loss": loss} if loss.aggregation not in ("", algorithm.aggregation) else False


@FILTER.add()
def _filter_range(config: Config) -> Broken:
    """algo.dynamic_filtering_range takes nothing or two numbers, the lower first, got {algo.dynamic_filtering_range}"""
    return _wrong_range(config)


def _wrong_range(config: Config) -> bool:
    bounds = config.algo.dynamic_filtering_range
    return len(bounds) not in (0, 2) or (len(bounds) == 2 and not bounds[0] < bounds[1])


@FILTER.add("rollout.vllm_generate_batch_size", "algo.dynamic_filtering_max_tries")
def _unfiltered(config: Config) -> Broken:
    """while algo.dynamic_filtering_enable is false, because nothing is sampled that is not trained on: switch that on,
    or leave the key out"""
    return not config.algo.dynamic_filtering_enable


@FILTER.add("algo.dynamic_filtering_range")
def _unfiltered_range(config: Config) -> Broken:
    """while algo.dynamic_filtering_enable is false, because nothing is sampled that is not trained on: switch that on,
    or leave the key out"""
    return not (config.algo.dynamic_filtering_enable or _wrong_range(config))


@FILTER.add()
def _filter_of_single_responses(config: Config) -> Broken:
    """algo.dynamic_filtering_enable compares the responses to one prompt, and with rollout.n_samples_per_prompt = 1 it
    would drop every prompt: use 2 or more, or switch it off"""
    return config.algo.dynamic_filtering_enable and config.rollout.n_samples_per_prompt == 1


@FILTER.add()
def _too_few_at_once(config: Config) -> Broken:
    """rollout.vllm_generate_batch_size = {rollout.vllm_generate_batch_size} is less than rollout.batch_size =
    {rollout.batch_size}, so not even a batch of which nothing is dropped would become full: use at least as many, or
    0"""
    rollout = config.rollout
    return config.algo.dynamic_filtering_enable and 0 < rollout.vllm_generate_batch_size < rollout.batch_size


@FILTER.add()
def _filter_of_components(config: Config) -> Broken:
    """algo.dynamic_filtering_enable drops groups whose rewards are equal, and algo.advantage.estimator = gdpo learns
    from components that may differ there: leave the filter out, which gives such groups a part of the batch, or use
    group_norm"""
    return config.algo.dynamic_filtering_enable and config.algo.advantage.estimator == "gdpo"


@FILTER.add("rollout.vllm_generate_batch_size")
def _filter_ahead(config: Config) -> Broken:
    """with vllm.sync_mode = inflight, which samples ahead as far as train.async_queue_size allows: leave the key out"""
    return config.algo.dynamic_filtering_enable and config.vllm.sync_mode == "inflight"


@FILTER.add()
def _filter_of_a_reward_model(config: Config) -> Broken:
    """algo.dynamic_filtering_enable judges each prompt while others are sampled, and reward.model_name_or_path scores
    whole batches and hardly ever gives two equal rewards: use a reward function (reward.remote_url), or switch it
    off"""
    return config.algo.dynamic_filtering_enable and bool(config.reward.model_name_or_path)


@SAMPLING.add()
def _whole_vocabulary(config: Config) -> Broken:
    """rollout.{name} = {value} would make the engine sample from a part of the vocabulary, while the trainer's
    log-probs, the ratio and the KL are over all of it, and the policy would learn from wrong ratios{unmended}: leave
    rollout.{name} at {whole}, and lower rollout.temperature, which both sides apply"""
    # With top_p or top_k the engine samples from a distribution that is cut off and scaled up, and the log-ratio of
    # every token is wrong by log Z. Evaluation may sample in any way: nothing is trained on it.
    unmended = " (algo.correction.* does not mend that: its ratios would be the wrong ones)" if corrects(config) else ""
    rows = (("top_p", config.rollout.top_p, 1), ("top_k", config.rollout.top_k, -1))
    return [
        {"name": name, "value": value, "whole": whole, "unmended": unmended}
        for name, value, whole in rows
        if value != whole
    ]


@SAMPLING.add()
def _coldest(config: Config) -> Broken:
    """rollout.temperature = {rollout.temperature:g} is below what the engine samples at: vLLM takes {coldest} instead,
    and the trainer's log-probs would be of another distribution: use {coldest} or more"""
    return {"coldest": COLDEST} if config.rollout.temperature < COLDEST else False
