"""Read the keys of `algo.correction`: the rule that they choose, where old log-probs come from, what contradicts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import cast

from slurm_rlhf.algorithms.registry import PRESETS, CorrectionRule, Level, Mode
from slurm_rlhf.config.roles import has_reference
from slurm_rlhf.config.rule import row_problems
from slurm_rlhf.config.schema import Config

GROUP = "algo.correction"


def correction_of(config: Config) -> CorrectionRule | None:
    """Find the rule that the losses of `config` are weighed by; None: by none. The keys have no problem."""
    keys = config.algo.correction
    if keys.level:
        return CorrectionRule(cast(Level, keys.level), cast(Mode, keys.mode), *keys.thresholds)
    preset = PRESETS.get(_preset(config))
    if preset is None or not keys.thresholds:
        return preset
    return CorrectionRule(preset.level, preset.mode, *keys.thresholds)


def corrects(config: Config) -> bool:
    """Tell whether the loss knows of the policy that sampled, by weights or by its ratio."""
    keys = config.algo.correction
    return bool(keys.bypass or keys.level or _preset(config) != "none" or keys.off_policy_delta)


def correction_problems(config: Config) -> Iterator[str]:
    """Find the keys of the correction that contradict each other, one sentence for each."""
    if config.algo.correction.bypass:
        yield from row_problems("bypass", config)
    else:
        yield from islice(row_problems("choice", config, chosen=_preset(config)), 1)
    yield from islice(row_problems("thresholds", config, chosen=_preset(config)), 1)


def _preset(config: Config) -> str:
    """Resolve `auto`: with bypass the ratio corrects by itself."""
    keys = config.algo.correction
    if keys.preset != "auto":
        return keys.preset
    return "tis" if config.vllm.sync_mode == "inflight" and not keys.bypass else "none"


def of_the_update(config: Config) -> bool:
    """Tell whether the old log-probs are those of the update's own forward pass, so that none is made before it.

    They are where a batch is one optimizer step, which starts from the policy that they are of, and where nothing needs
    them before: no correction, no reference to compare with. The ratio is 1 then, and its gradient is that of the
    log-probs. TRL and verl leave out the same pass.
    """
    responses = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    one_step = config.train.max_epochs == 1 and config.train.batch_size == responses
    needed = corrects(config) or has_reference(config) or config.critic.freezing_steps
    return config.actor.old_logprobs == "auto" and one_step and not needed


def before_update(config: Config) -> bool:
    """Tell whether the actor computes log-probs before the update: not with the engines', and not `of_the_update`."""
    return not (config.algo.correction.bypass or of_the_update(config))
