"""Read the keys of `algo.correction`: the rule that they choose, where old log-probs come from, what contradicts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import cast

from slurm_rlhf.algorithms.registry import PRESETS, CorrectionRule, Level, Mode
from slurm_rlhf.config.roles import has_reference
from slurm_rlhf.config.rule import Broken, Rules
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
        yield from BypassRules(config).problems()
    else:
        yield from islice(ChoiceRules(config).problems(), 1)
    yield from islice(ThresholdRules(config).problems(), 1)


class _CorrectionRules(Rules):
    def __init__(self, config: Config) -> None:
        self.keys = config.algo.correction
        given = "level" if self.keys.level else "mode"
        own = f"algo.correction.{given} = {self.keys.level or self.keys.mode}"
        thresholds = f"algo.correction.thresholds = {self.keys.thresholds}"
        super().__init__(config, own=own, thresholds=thresholds, keys=self.keys)


class ChoiceRules(_CorrectionRules):
    """Check that one correction is chosen, and whole."""

    group = "choice"

    def half_a_correction(self) -> Broken:
        """{own} says half of a correction: set algo.correction.{missing}, too, or choose a algo.correction.preset"""
        missing = "mode" if self.keys.level else "level"
        return {"missing": missing} if bool(self.keys.level) != bool(self.keys.mode) else False

    def thresholds_of_nothing(self) -> Broken:
        """{thresholds} have no effect with algo.correction.preset = {keys.preset}{auto}: choose tis, icepop or
        seq_mask, or set algo.correction.level and algo.correction.mode"""
        auto = ", which is none with vllm.sync_mode = drain" if self.keys.preset == "auto" else ""
        idle = bool(self.keys.thresholds) and not self.keys.level and _preset(self.config) == "none"
        return {"auto": auto} if idle else False


class ThresholdRules(_CorrectionRules):
    """Find thresholds that would drop or bound tokens on which engine and actor agree: there the ratio is 1."""

    @property
    def _bounds(self) -> tuple[float, float]:
        low, high = self.keys.thresholds or (0.0, 1.0)
        return low, high

    def two_numbers(self) -> Broken:
        """{thresholds} takes two numbers, low and high, or none"""
        return len(self.keys.thresholds) not in (0, 2)

    def order(self) -> Broken:
        """{thresholds} are the wrong way round, or equal: the lower one comes first"""
        return self._bounds[0] >= self._bounds[1]

    def without_one(self) -> Broken:
        """{thresholds} leave out 1, the ratio where engine and actor agree, so that every token would be dropped or
        bounded: use low <= 1 <= high"""
        return self._bounds[0] > 1 or self._bounds[1] < 1

    def lower_bound_of_a_truncation(self) -> Broken:
        """{thresholds} has a lower bound that {truncating} does not apply: use [0, {high:g}], or algo.correction.level
        = {level} with algo.correction.mode = clip"""
        keys, (low, high) = self.keys, self._bounds
        truncating = "mode = truncate" if keys.mode else f"preset = {keys.preset}, which truncates"
        found = {"truncating": f"algo.correction.{truncating}", "high": high, "level": keys.level or "token"}
        return found if low > 0 and _mode(self.config) == "truncate" else False


class BypassRules(_CorrectionRules):
    """Find keys that algo.correction.bypass leaves nothing to do."""

    group = "bypass"

    def weights(self) -> Broken:
        """algo.correction.bypass = true takes the update's ratio to the engine's log-probs, which leaves none for
        {weighing} to bound: leave one or the other out"""
        keys = self.keys
        preset = keys.preset if keys.preset in PRESETS else ""
        others = {"preset": preset, "level": keys.level, "mode": keys.mode, "thresholds": keys.thresholds}
        weighing = [f"algo.correction.{name} = {value}" for name, value in others.items() if value]
        return {"weighing": " and ".join(weighing)} if weighing else False


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
