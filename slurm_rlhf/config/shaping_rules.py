"""Rules over the keys that judge a response by its end and its length: `controller/shaping.py` applies them."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rlhf.algorithms.registry import Algorithm
from slurm_rlhf.config.schema import Config


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
    if reward.overlong_penalty_factor != 1 and not reward.overlong_buffer_len:
        yield (
            f"reward.overlong_penalty_factor = {reward.overlong_penalty_factor:g} has no effect without "
            "reward.overlong_buffer_len, the tokens over which it rises: set both, or leave it out"
        )
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
        for name, value, default in (("min_pattern_size", smallest, 1), ("min_count", count, 8)):
            if value != default:
                yield f"{key}{name} = {value} has no effect without {key}max_pattern_size: set both, or leave it out"
    elif smallest > largest:
        yield f"{key}min_pattern_size = {smallest} is above {key}max_pattern_size = {largest}: no pattern is both"
    elif smallest * count > rollout.max_new_tokens:
        yield (
            f"{key}min_pattern_size = {smallest} times {key}min_count = {count} is more than rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}, so that no response can repeat itself: lower one of them"
        )
