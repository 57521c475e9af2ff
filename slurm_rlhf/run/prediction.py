"""Compares the seconds of a run's phases with those that `placement.step_time` predicts for the lengths it has had."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.gpus import Gpu
from slurm_rlhf.placement.memory import Models
from slurm_rlhf.placement.step_time import RATES, Cores, Links, Rates, StepLengths, predict
from slurm_rlhf.records import Experience

MEASURED = {"sampling": "time/rollout", "forward": "time/forward", "update": "time/update"}
"""Phase of a prediction -> the metric with its seconds. Those of weight updates depend on links of unknown speed."""

LAST = 16
"""Steps of a run that are compared, each by the lengths of its sequences."""


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Hold the seconds of a phase, medians of the last steps."""

    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Hold what is known of the hardware."""

    gpu: Gpu
    links: Links
    rates: Rates = RATES
    cores: Cores | None = None  # None: on GPUs


@dataclass(slots=True)
class Prediction:
    """Collects the lengths and seconds of the last steps of a run with engines."""

    config: Config
    models: Models | None = None  # None: a shape is not known, and nothing is compared
    speeds: Speeds | None = None
    _first: bool = field(default=True, init=False)  # only the first step is there
    _seconds: dict[str, deque[float]] = field(default_factory=dict, init=False)
    _lengths: deque[StepLengths] = field(default_factory=partial(deque, maxlen=LAST), init=False)

    def step(self, experience: Experience, timings: Mapping[str, float]) -> None:
        """Note a step; `timings` holds its phases, as `time/<phase>`.

        The first of several does not count: kernels are compiled in it.
        """
        if self._first and self._lengths:
            self._first = False
            self._lengths.clear()
            self._seconds.clear()
        responses, prompt = experience.response_lens.tolist(), round(float(experience.prompt_lens.mean()))
        self._lengths.append(StepLengths(responses, experience.lengths.tolist(), prompt))
        ahead = self.config.vllm.sync_mode == "inflight"  # then a step waits for what is left of sampling
        for phase, name in MEASURED.items():
            if name in timings and not (ahead and phase == "sampling"):
                self._seconds.setdefault(phase, deque(maxlen=LAST)).append(timings[name])

    def compared(self) -> dict[str, PhaseSeconds]:
        """Predict the phases, and put what was measured beside; empty before the first step."""
        known = self.speeds
        if not self._lengths or self.models is None or known is None:
            return {}
        found = [
            predict(self.config, self.models, known.gpu, known.links, 0.0, step, known.rates, known.cores).phases
            for step in self._lengths
        ]
        return {
            phase: PhaseSeconds(median(each[phase] for each in found), median(seconds))
            for phase, seconds in self._seconds.items()
        }


def words(compared: Mapping[str, PhaseSeconds]) -> str:
    """Put predicted and measured seconds side by side; empty: nothing was compared."""
    pairs = [f"{phase} {each.predicted:.3g}/{each.measured:.3g}" for phase, each in compared.items()]
    return f"seconds of a step, predicted/measured: {', '.join(pairs)}" if pairs else ""
