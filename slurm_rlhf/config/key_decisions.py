"""What several keys decide together: how a model reads micro-batches, and how `algo.correction` corrects."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from slurm_rlhf.algorithms.layout import Layout
from slurm_rlhf.algorithms.registry import PRESETS, CorrectionRule, Level, Mode
from slurm_rlhf.config.architectures import PACKED
from slurm_rlhf.config.model_directory import read_config, text_config
from slurm_rlhf.config.roles import has_reference
from slurm_rlhf.config.rules import row_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_models import Ds
from slurm_rlhf.errors import ConfigError

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


def layout_of(ds: Ds, path: str) -> Layout:
    """Tell how the model in `path` reads micro-batches. Raises ModelError, and ConfigError for ds.ulysses_size.

    Attention costs 1 / (12 hidden size) for a pair of tokens: a layer has about 12 hidden^2 parameters, 2 FLOPs a token
    each, and attention, where tokens see half of the others, 2 hidden FLOPs a pair.
    """
    config = text_config(read_config("the model", Path(path)))
    able = ds.packing_samples == "always" or config.get("model_type") in PACKED
    packed = ds.packing_samples != "never" and able and ds.attn_implementation not in ("eager", "flex_attention")
    if ds.ulysses_size > 1:
        _check_cut(ds, path, config, packed)
    return Layout(packed, 1 / (12 * int(config.get("hidden_size") or 1024)), ds.ulysses_size)


def _check_cut(ds: Ds, path: str, config: dict[str, Any], packed: bool) -> None:
    """Check that ds.ulysses_size ranks can compute a row of the model together. Raises ConfigError."""
    asked, heads = f"ds.ulysses_size = {ds.ulysses_size}", int(config.get("num_attention_heads") or 0)
    if ds.attn_implementation != "sdpa":
        raise ConfigError(
            f"{asked} exchanges heads around the trainer's own attention, and ds.attn_implementation = "
            f"{ds.attn_implementation} is another: leave one of the two keys out"
        )
    if not packed:
        raise ConfigError(
            f"{asked} cuts rows in which sequences lie end to end, and the model in {path} has a row for each "
            f"sequence, by ds.packing_samples = {ds.packing_samples}: leave one of the two keys out, or use a model of "
            "`slurm-rlhf docs models`, No padding"
        )
    if not heads or heads % ds.ulysses_size:
        valid = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0) or "1"
        raise ConfigError(
            f"{asked} does not divide the {heads} attention heads (num_attention_heads) of the model in {path}. Valid "
            f"sizes: {valid}"
        )
