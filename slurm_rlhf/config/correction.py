"""Read the keys of `algo.correction`: the rule that they choose, where old log-probs come from, what contradicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from slurm_rlhf.algorithms.registry import PRESETS, CorrectionRule, Level, Mode
from slurm_rlhf.config.roles import has_reference
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


def bypass_note(config: Config) -> str:
    """Say what `bypass` means for a run that is to be the same bit for bit; empty for any other run."""
    if not (config.algo.correction.bypass and config.train.full_determinism):
        return ""
    return (
        f"{GROUP}.bypass with train.full_determinism: the old log-probs are the engines', which round by what else is "
        "in their batch. The run is the same bit for bit only with the same engines (vllm.num_engines, "
        "vllm.tensor_parallel_size, vllm.max_num_seqs), and the ratio of a step's first update is 1 up to rounding"
    )


def correction_problems(config: Config) -> Iterator[str]:
    """Find the keys of the correction that contradict each other, one sentence for each."""
    keys = config.algo.correction
    given = "level" if keys.level else "mode"
    own = f"{GROUP}.{given} = {keys.level or keys.mode}"
    if keys.bypass:
        yield from _bypass_problems(config)
    elif (keys.level or keys.mode) and keys.preset != "auto":
        yield f"{own} and {GROUP}.preset = {keys.preset} are two corrections: leave one of them out"
    elif bool(keys.level) != bool(keys.mode):
        missing = "mode" if keys.level else "level"
        yield f"{own} says half of a correction: set {GROUP}.{missing}, too, or choose a {GROUP}.preset"
    elif keys.level and not keys.thresholds:
        yield (
            f"{own} with {GROUP}.mode = {keys.mode} needs {GROUP}.thresholds: usual are [0, 2] to truncate, [0.5, 5] "
            "to mask or clip, [0.99, 1.01] to mask by the geometric mean"
        )
    elif keys.thresholds and not keys.level and _preset(config) == "none":
        auto = ", which is none with vllm.sync_mode = drain" if keys.preset == "auto" else ""
        yield (
            f"{GROUP}.thresholds = {keys.thresholds} have no effect with {GROUP}.preset = {keys.preset}{auto}: choose "
            f"tis, icepop or seq_mask, or set {GROUP}.level and {GROUP}.mode"
        )
    yield from threshold_problems(config)


def threshold_problems(config: Config) -> Iterator[str]:
    """Find thresholds that would drop or bound what agrees: there the ratio is 1."""
    keys = config.algo.correction
    given = f"{GROUP}.thresholds = {keys.thresholds}"
    if not keys.thresholds:
        return
    if len(keys.thresholds) != 2:
        yield f"{given} takes two numbers, low and high, or none"
        return
    low, high = keys.thresholds
    if low >= high:
        yield f"{given} are the wrong way round, or equal: the lower one comes first"
    elif low > 1 or high < 1:
        yield (
            f"{given} leave out 1, the ratio where engine and actor agree, so that every token would be dropped or "
            "bounded: use low <= 1 <= high"
        )
    elif low > 0 and _mode(config) == "truncate":
        told = f"{GROUP}.mode = truncate" if keys.mode else f"{GROUP}.preset = {keys.preset}, which truncates"
        yield (
            f"{given} has a lower bound that {told} does not apply: use [0, {high:g}], or {GROUP}.level = "
            f"{keys.level or 'token'} with {GROUP}.mode = clip"
        )


def _bypass_problems(config: Config) -> Iterator[str]:
    keys = config.algo.correction
    preset = keys.preset if keys.preset in PRESETS else ""
    others = {"preset": preset, "level": keys.level, "mode": keys.mode, "thresholds": keys.thresholds}
    weighing = [f"{GROUP}.{name} = {value}" for name, value in others.items() if value]
    why = f"{GROUP}.bypass = true takes the update's ratio to the engine's log-probs, which leaves none for"
    if weighing:
        yield f"{why} {' and '.join(weighing)} to bound: leave one or the other out"
    if config.actor.old_logprobs == "pass":
        yield f"{why} actor.old_logprobs = pass to compute: leave one of the two out"
    if keys.off_policy_delta:
        yield f"{why} {GROUP}.off_policy_delta = {keys.off_policy_delta:g} to compare with: leave one of the two out"


def _preset(config: Config) -> str:
    """Resolve `auto`: with bypass the ratio corrects by itself."""
    keys = config.algo.correction
    if keys.preset != "auto":
        return keys.preset
    return "tis" if config.vllm.sync_mode == "inflight" and not keys.bypass else "none"


def _mode(config: Config) -> str:
    keys = config.algo.correction
    preset = PRESETS.get(_preset(config))
    return keys.mode or ("" if keys.level or preset is None else preset.mode)


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
