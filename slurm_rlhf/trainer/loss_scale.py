"""The loss scale of fp16: gradients are multiplied by it until the optimizer step, so that small ones do not vanish.

fp16 has 10 bits after the first, against bf16's 7, and numbers from 6e-8 to 65504 only. Source of the scheme:
Micikevicius et al., Mixed Precision Training (2018), section 3.2. There is no hysteresis:
every overflow halves the scale.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import RunError


@dataclass(slots=True)
class LossScale:
    """Holds the scale s of the next optimizer step; a step that overflows is skipped.

    s := s / 2 after a step that overflowed, s := 2 s after `window` steps in a row that did not.
    """

    scale: float
    window: int
    least: float
    passed: int = 0  # steps in a row since the scale changed
    overflows: int = 0  # steps in a row that were skipped

    @classmethod
    def of(cls, ds: Ds) -> LossScale | None:
        """Read the settings; None where gradients need no scale."""
        if ds.param_dtype != "fp16":
            return None
        return cls(2.0**ds.initial_scale_power, ds.loss_scale_window, ds.min_loss_scale)

    def step_passed(self) -> None:
        """Count a step whose gradient was finite."""
        self.overflows = 0
        self.passed += 1
        if self.passed == self.window:
            self.scale, self.passed = 2.0 * self.scale, 0

    def step_overflowed(self, step: int) -> None:
        """Halve the scale, because optimizer step `step` had a gradient that is not finite.

        Raises RunError if the scale is the smallest already: then it is not the scale that makes it so.
        """
        self.overflows += 1
        if self.scale <= self.least:
            raise RunError(
                f"the gradient of optimizer step {step} is not finite, {self.overflows} times in a row and now at the "
                f"smallest loss scale, ds.min_loss_scale = {self.least:g}; the parameters were not changed. Usual "
                "causes: activations beyond fp16's 65504 (set ds.param_dtype = bf16), a learning rate that is too "
                "high, or rewards out of range (see reward.clip_range)."
            )
        self.scale, self.passed = max(self.scale / 2.0, self.least), 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        kept = asdict(self)
        return {name: kept[name] for name in ("scale", "passed", "overflows")}

    def load(self, state: dict[str, float]) -> None:
        """Continue where `state` was called."""
        self.scale, self.passed, self.overflows = state["scale"], int(state["passed"]), int(state["overflows"])
