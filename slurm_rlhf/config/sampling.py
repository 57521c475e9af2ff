"""How responses may be sampled so that the trainer takes the log-probs of the same distribution."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rlhf.config.schema import Config

COLDEST = 0.01
"""vLLM samples at this temperature where less is asked for (`vllm.sampling_params._MAX_TEMP`)."""


def sampling(config: Config) -> Iterator[str]:
    """One sentence per rule that the rollout keys break; evaluation samples as it likes, nothing is trained on it.

    The trainer's log-probs are over the whole vocabulary at `rollout.temperature`. With top_p or top_k the engine
    samples from a distribution that is cut off and scaled up, and the log-ratio of every token is wrong by log Z.
    """
    rollout = config.rollout
    for name, value, whole in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, -1)):
        if value != whole:
            yield (
                f"rollout.{name} = {value} would make the engine sample from a part of the vocabulary, while the "
                "trainer's log-probs, the ratio and the KL are over all of it, and the policy would learn from wrong "
                f"ratios: leave rollout.{name} at {whole}, and lower rollout.temperature, which both sides apply"
            )
    if rollout.temperature < COLDEST:
        yield (
            f"rollout.temperature = {rollout.temperature:g} is below what the engine samples at: vLLM takes {COLDEST} "
            f"instead, and the trainer's log-probs would be of another distribution: use {COLDEST} or more"
        )
