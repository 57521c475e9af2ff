"""Rules over the keys of the algorithm, its loss, sampling, and penalties for the end or the length of a response."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rlhf.algorithms.registry import Algorithm
from slurm_rlhf.config.correction import corrects
from slurm_rlhf.config.keys import all_keys, without_effect
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
    samples, least = config.rollout.n_samples_per_prompt, algorithm.min_samples_per_prompt
    if samples < least:
        yield (
            f"algo.advantage.estimator = {algorithm.name} compares the responses to one prompt: it needs "
            f"rollout.n_samples_per_prompt of at least {least}, got {samples}"
        )
    if config.critic.freezing_steps and not algorithm.needs_critic:
        yield (
            f"critic.freezing_steps = {config.critic.freezing_steps} trains the critic alone at first, and "
            f"algo.advantage.estimator = {algorithm.name} has none: leave the key out"
        )
    yield from _advantage_problems(config, algorithm)
    yield from shaping_problems(config, algorithm)


def _advantage_problems(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Check the keys of advantages that have no meaning for the algorithm."""
    advantage, chosen = config.algo.advantage, f"algo.advantage.estimator = {algorithm.name}"
    if -1 < advantage.lambd_critic < 0:
        yield (
            f"algo.advantage.lambd_critic = {advantage.lambd_critic:g} is no lambda: use -1 for that of "
            "algo.advantage.lambd, or a number from 0 to 1"
        )
    if advantage.lambd_critic != -1 and not algorithm.needs_critic:
        yield (
            f"algo.advantage.lambd_critic = {advantage.lambd_critic:g} is for the returns that a critic learns, and "
            f"{chosen} has none: leave the key out"
        )
    if advantage.no_std_norm and not algorithm.divides_by_spread:
        if not algorithm.whiten:
            yield (
                f"algo.advantage.no_std_norm = true leaves out a division by a standard deviation, and {chosen} has "
                "none: leave the key out"
            )
        elif advantage.no_whitening:
            yield (
                "algo.advantage.no_std_norm = true keeps the mean of the whitening that algo.advantage.no_whitening = "
                "true leaves out whole: set one of them"
            )
    if advantage.no_whitening and not algorithm.whiten:
        yield (
            f"algo.advantage.no_whitening = true leaves out the whitening of advantages, and {chosen} has none: leave "
            "the key out"
        )
    yield from _component_problems(config, algorithm)


def _component_problems(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Check the keys of a reward that has several components."""
    keys, weights = config.algo.advantage.gdpo_reward_keys, config.algo.advantage.gdpo_reward_weights
    chosen = f"algo.advantage.estimator = {algorithm.name}"
    if not algorithm.needs_components:
        names = ("algo.advantage.gdpo_reward_keys", "algo.advantage.gdpo_reward_weights")
        yield from without_effect(config, names, f"with {chosen}: use gdpo, or leave the key out")
        return
    if len(set(keys)) < len(keys):
        yield f"algo.advantage.gdpo_reward_keys = {keys} names a component twice: leave one out"
    if weights and len(weights) != len(keys):
        yield (
            f"algo.advantage.gdpo_reward_weights has {len(weights)} weights for {len(keys)} "
            "algo.advantage.gdpo_reward_keys: name each component that has a weight, in the same order"
        )
    if weights and not any(weights):
        yield "algo.advantage.gdpo_reward_weights are all 0, so that there is nothing to learn: weigh one component"
    if config.reward.model_name_or_path:
        yield (
            f"{chosen} takes several rewards for each response, and reward.model_name_or_path gives one: use a reward "
            "function that answers components"
        )
    if config.reward.normalize_enable:
        yield (
            f"reward.normalize_enable = true normalises the reward, and {chosen} learns from its components, each "
            "normalised in its group: leave the key out"
        )


def ahead_problems(config: Config) -> Iterator[str]:
    """Check the keys that exclude sampling while the actor trains, or have no effect without it."""
    if config.vllm.sync_mode == "inflight" and config.train.full_determinism:
        yield (
            "train.full_determinism = true excludes vllm.sync_mode = inflight: between which two tokens the weights "
            "change depends on time. Use vllm.sync_mode = drain, or leave full_determinism out"
        )
    if config.vllm.sync_mode == "drain":
        yield from without_effect(
            config,
            ("train.async_queue_size", "train.staleness_threshold"),
            "with vllm.sync_mode = drain, which samples nothing ahead: set vllm.sync_mode = inflight, or leave the key "
            "out",
        )


def filter_problems(config: Config) -> Iterator[str]:
    """Check the keys of dynamic sampling against each other."""
    algo, rollout = config.algo, config.rollout
    at_once, bounds = rollout.vllm_generate_batch_size, algo.dynamic_filtering_range
    wrong = len(bounds) not in (0, 2) or (len(bounds) == 2 and not bounds[0] < bounds[1])
    if wrong:
        yield f"algo.dynamic_filtering_range takes nothing or two numbers, the lower first, got {bounds}"
    if not algo.dynamic_filtering_enable:
        names = ["rollout.vllm_generate_batch_size", "algo.dynamic_filtering_max_tries"]
        yield from without_effect(
            config,
            names if wrong else [*names, "algo.dynamic_filtering_range"],
            "while algo.dynamic_filtering_enable is false, because nothing is sampled that is not trained on: switch "
            "that on, or leave the key out",
        )
        return
    if rollout.n_samples_per_prompt == 1:
        yield (
            "algo.dynamic_filtering_enable compares the responses to one prompt, and with "
            "rollout.n_samples_per_prompt = 1 it would drop every prompt: use 2 or more, or switch it off"
        )
    if 0 < at_once < rollout.batch_size:
        yield (
            f"rollout.vllm_generate_batch_size = {at_once} is less than rollout.batch_size = {rollout.batch_size}, so "
            "not even a batch of which nothing is dropped would become full: use at least as many, or 0"
        )
    if config.algo.advantage.estimator == "gdpo":
        yield (
            "algo.dynamic_filtering_enable drops groups whose rewards are equal, and algo.advantage.estimator = gdpo "
            "learns from components that may differ there: leave the filter out, which gives such groups a part of "
            "the batch, or use group_norm"
        )
    if config.vllm.sync_mode == "inflight":
        yield from without_effect(
            config,
            ["rollout.vllm_generate_batch_size"],
            "with vllm.sync_mode = inflight, which samples ahead as far as train.async_queue_size allows: leave the "
            "key out",
        )
    if config.reward.model_name_or_path:
        yield (
            "algo.dynamic_filtering_enable judges each prompt while others are sampled, and "
            "reward.model_name_or_path scores whole batches and hardly ever gives two equal rewards: use a reward "
            "function (reward.remote_url), or switch it off"
        )


def sampling_problems(config: Config) -> Iterator[str]:
    """Check that the trainer can take the log-probs of the distribution that engines sample from.

    They are over the whole vocabulary at `rollout.temperature`. With top_p or top_k the engine samples from a
    distribution that is cut off and scaled up, and the log-ratio of every token is wrong by log Z. Evaluation may
    sample in any way: nothing is trained on it.
    """
    rollout, unmended = config.rollout, ""
    if corrects(config):
        unmended = " (algo.correction.* does not mend that: its ratios would be the wrong ones)"
    for name, value, whole in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, -1)):
        if value != whole:
            yield (
                f"rollout.{name} = {value} would make the engine sample from a part of the vocabulary, while the "
                "trainer's log-probs, the ratio and the KL are over all of it, and the policy would learn from wrong "
                f"ratios{unmended}: leave rollout.{name} at {whole}, and lower rollout.temperature, which both sides "
                "apply"
            )
    if rollout.temperature < COLDEST:
        yield (
            f"rollout.temperature = {rollout.temperature:g} is below what the engine samples at: vLLM takes {COLDEST} "
            f"instead, and the trainer's log-probs would be of another distribution: use {COLDEST} or more"
        )


def shaping_problems(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Check penalties, the mask of truncated responses, and repetition ends against each other and the algorithm."""
    yield from _penalties(config)
    yield from _beside_the_algorithm(config, algorithm)
    yield from _repetition(config)


def _penalties(config: Config) -> Iterator[str]:
    reward, rollout = config.reward, config.rollout
    if reward.overlong_buffer_len > rollout.max_new_tokens:
        yield (
            f"reward.overlong_buffer_len = {reward.overlong_buffer_len} is more than rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}, so that even an empty response would be too long: take a part of the latter"
        )
    if not reward.overlong_buffer_len:
        why = "without reward.overlong_buffer_len, the tokens over which it rises: set both, or leave it out"
        yield from without_effect(config, ["reward.overlong_penalty_factor"], why)
    if reward.length_penalty_coef and rollout.n_samples_per_prompt < 2:
        yield (
            f"reward.length_penalty_coef = {reward.length_penalty_coef:g} compares the lengths of the responses to one "
            "prompt: it needs rollout.n_samples_per_prompt of at least 2"
        )
    coef = reward.stop_properly_penalty_coef
    if coef < 1 and rollout.mask_truncated:
        yield (
            f"reward.stop_properly_penalty_coef = {coef:g} is a penalty for responses that were cut off, and "
            "rollout.mask_truncated = true does not train on them, so it would only shift the others' baseline: set "
            "one of the two"
        )
    if 0 <= coef < 1 and reward.normalize_enable:
        yield (
            f"reward.stop_properly_penalty_coef = {coef:g} brings rewards nearer to 0, and with "
            "reward.normalize_enable = true that is the mean, so bad responses that were cut off would gain by it: use "
            "a coefficient below 0, which replaces the reward"
        )


def _beside_the_algorithm(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Check the penalties of an algorithm that does not learn from the reward itself, or from one above 0."""
    reward, chosen = config.reward, f"algo.advantage.estimator = {algorithm.name}"
    settings = {
        f"reward.overlong_buffer_len = {reward.overlong_buffer_len}": reward.overlong_buffer_len > 0,
        f"reward.length_penalty_coef = {reward.length_penalty_coef:g}": reward.length_penalty_coef > 0,
        f"reward.stop_properly_penalty_coef = {reward.stop_properly_penalty_coef:g}": (
            reward.stop_properly_penalty_coef < (1 if algorithm.needs_components else 0)
        ),
    }
    if algorithm.needs_components:
        for setting in (name for name, on in settings.items() if on):
            yield (
                f"{setting} changes the reward, and {chosen} learns from its components: leave the key out, and have "
                "the reward function answer length as one of the components"
            )
    if algorithm.refuses_negative_rewards:
        settings["reward.normalize_enable = true"] = reward.normalize_enable
        for setting in (name for name, on in settings.items() if on):
            yield f"{setting} makes rewards negative, and {chosen} takes rewards of 0 and above: leave the key out"


def _repetition(config: Config) -> Iterator[str]:
    rollout, key = config.rollout, "rollout.repetition_detection_"
    largest, smallest = rollout.repetition_detection_max_pattern_size, rollout.repetition_detection_min_pattern_size
    count = rollout.repetition_detection_min_count
    if not largest:
        names = (f"{key}min_pattern_size", f"{key}min_count")
        yield from without_effect(config, names, f"without {key}max_pattern_size: set both, or leave it out")
    elif smallest > largest:
        yield f"{key}min_pattern_size = {smallest} is above {key}max_pattern_size = {largest}: no pattern is both"
    elif smallest * count > rollout.max_new_tokens:
        yield (
            f"{key}min_pattern_size = {smallest} times {key}min_count = {count} is more than rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}, so that no response can repeat itself: lower one of them"
        )


def loss_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of the policy loss. The name of the algorithm has to be a valid one."""
    yield from _ranges(config)
    yield from _kl(config)
    algorithm, actor = algorithm_of(config), config.actor
    if algorithm.policy_loss is not None:
        if actor.policy_loss_type != all_keys()[TYPE].default:
            yield (
                f"algo.advantage.estimator = {algorithm.name} brings a policy loss of its own, which "
                f"{TYPE} = {actor.policy_loss_type} would replace: leave {TYPE} out, or choose an algorithm without one"
            )
        return
    yield from _unused(config)
    yield from _aggregation(config)


def _ranges(config: Config) -> Iterator[str]:
    actor = config.actor
    if 0 < actor.dual_clip <= 1:
        yield (
            f"actor.dual_clip = {actor.dual_clip:g} would cut off tokens that did not become likelier: it bounds a "
            "ratio, use a number above 1 (3 is usual), or 0 to switch it off"
        )
    if len(actor.eps_clip_low_high) == 2:
        low, high = actor.eps_clip_low_high
        if high < low < 1:
            yield (
                f"actor.eps_clip_low_high = {low:g} {high:g} is the wrong way round: the range below comes first and "
                f"is the narrower one, write {high:g} {low:g} (a range of 1 or more below is no bound at all)"
            )
    if actor.eps_clip_low_high and actor.policy_loss_type == PPO:
        sides = " ".join(f"{side:g}" for side in actor.eps_clip_low_high)
        why = f"beside actor.eps_clip_low_high = {sides}, which says how far on either side: leave one of them out"
        yield from without_effect(config, [EPS_CLIP], why)


def _kl(config: Config) -> Iterator[str]:
    kl = config.algo.kl
    if kl.use_loss and not kl.init_coef:
        yield (
            "algo.kl.use_loss = true adds a KL term of weight algo.kl.init_coef = 0, and no reference is started: "
            "set algo.kl.init_coef above 0, or leave use_loss out"
        )
    if not kl.target:
        why = "without algo.kl.target, which it says how fast to reach: set algo.kl.target, or leave the key out"
        yield from without_effect(config, ["algo.kl.horizon"], why)
    if kl.use_loss and kl.estimator == "k1":
        yield (
            "algo.kl.use_loss = true with algo.kl.estimator = k1 would add noise alone, because the mean gradient of "
            "k1 is zero: set algo.kl.estimator to k2 or k3+, whose gradient is that of the KL divergence, or to k3"
        )


def _unused(config: Config) -> Iterator[str]:
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


def _aggregation(config: Config) -> Iterator[str]:
    """Check that loss and algorithm do not each bring an aggregation that makes them what they are."""
    from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

    algorithm, loss = algorithm_of(config), POLICY_LOSSES[config.actor.policy_loss_type]
    usual = type(algorithm).__dataclass_fields__["aggregation"].default
    if config.actor.loss_agg_mode or algorithm.aggregation == usual:
        return
    if loss.aggregation not in ("", algorithm.aggregation):
        yield (
            f"algo.advantage.estimator = {algorithm.name} adds up losses by {algorithm.aggregation} and {TYPE} = "
            f"{loss.name} by {loss.aggregation}: say which with actor.loss_agg_mode"
        )
