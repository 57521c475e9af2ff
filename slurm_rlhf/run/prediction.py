"""Compares the seconds of a run's phases with those that `placement.step_time` predicts for the lengths it has had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean, median

from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.gpus import Gpu
from slurm_rlhf.placement.memory import Models
from slurm_rlhf.placement.step_time import RATES, Cores, Links, Rates, predict
from slurm_rlhf.records import Experience

MEASURED = {"sampling": "time/rollout", "forward": "time/forward", "update": "time/update"}
"""Phase of a prediction -> the metric with its seconds. Those of weight updates depend on links of unknown speed."""


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Hold the seconds of a phase of a step."""

    predicted: float
    measured: float  # median of the steps since the start


@dataclass(frozen=True, slots=True)
class Speeds:
    """Hold what is known of the hardware."""

    gpu: Gpu
    links: Links
    rates: Rates = RATES
    cores: Cores | None = None  # None: on GPUs


@dataclass(slots=True)
class Prediction:
    """Collects the lengths and seconds of the steps of a run with engines."""

    config: Config
    models: Models | None = None  # None: a shape is not known, and nothing is compared
    speeds: Speeds | None = None
    _seconds: dict[str, list[float]] = field(default_factory=dict, init=False)
    _lengths: list[tuple[float, float]] = field(default_factory=list, init=False)  # mean tokens of prompt and response

    def step(self, experience: Experience, timings: Mapping[str, float]) -> None:
        """Note a step; `timings` holds its phases, as `time/<phase>`."""
        self._lengths.append((float(experience.prompt_lens.mean()), float(experience.response_lens.mean())))
        ahead = self.config.vllm.sync_mode == "inflight"  # then a step waits for what is left of sampling
        for phase, name in MEASURED.items():
            if name in timings and not (ahead and phase == "sampling"):
                self._seconds.setdefault(phase, []).append(timings[name])

    def compared(self) -> dict[str, PhaseSeconds]:
        """Predict the phases, and put what was measured beside; empty before the first step.

        The first of several steps does not count: kernels are compiled in it.
        """
        known = self.speeds
        if not self._lengths or self.models is None or known is None:
            return {}
        prompt, response = (mean(of) for of in zip(*self._lengths, strict=True))
        found = predict(
            self.config, self.models, known.gpu, known.links, 0.0, response, round(prompt), known.rates, known.cores
        )
        return {
            phase: PhaseSeconds(found.phases[phase], median(seconds[1:] or seconds))
            for phase, seconds in self._seconds.items()
        }


def words(compared: Mapping[str, PhaseSeconds]) -> str:
    """Put predicted and measured seconds side by side; empty: nothing was compared."""
    pairs = [f"{phase} {each.predicted:.3g}/{each.measured:.3g}" for phase, each in compared.items()]
    return f"seconds of a step, predicted/measured: {', '.join(pairs)}" if pairs else ""
