"""Measurements of a run on CPUs before its first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slurm_rlhf.config.roles import ACTOR, ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.placement.step_time import Cores, Links, Probe, measured
from slurm_rlhf.run import prediction
from slurm_rlhf.run.prediction import Measurement, Speeds


def test_a_weight_update_takes_what_others_took_before_the_first_step() -> None:
    own: Any = SimpleNamespace(config=Config(), models={}, speeds=lambda: None)
    seconds = [3.0, 1.0, 2.0]
    assert Measurement.prediction(own, lambda: {"time/sync_transfer": seconds.pop()}).sync_s == 2.0
    assert Measurement.prediction(own, dict).sync_s is None  # all engines were lost


@pytest.mark.parametrize(("of_token", "tokens"), [(1e6, 440), (2e8, 111), (1e12, 56)])
def test_sequences_of_a_large_model_are_cut(monkeypatch: pytest.MonkeyPatch, of_token: float, tokens: int) -> None:
    work = SimpleNamespace(update_flops=lambda: of_token * (len(own.prompt) + own._response))
    own: Any = SimpleNamespace(config=Config(), roles={}, prompt=np.ones(10, np.int32), _work=lambda count: work)
    own.ranks = SimpleNamespace(roles={}, world=lambda role: 1)
    monkeypatch.setattr(prediction, "known_models", lambda config: {ACTOR: None})
    Measurement.__post_init__(own)
    assert len(own.prompt) + own._response == tokens


@pytest.mark.parametrize(
    ("flops", "tokens", "passed"),
    [(1e9, 3000, 12), (4e9, 3000, 8), (1e10, 3000, 6), (3e10, 3000, 2), (1e9, 179, 5), (3.1e10, 3000, 0)],
)
def test_how_much_is_measured_and_what_of_it_counts(
    monkeypatch: pytest.MonkeyPatch, flops: float, tokens: int, passed: int
) -> None:
    """Few sequences of a large model, and none of one too large; sampling counts by the median of three."""
    monkeypatch.setattr(prediction, "batch_flops", lambda *_: 1e9)
    own: Any = SimpleNamespace(config=Config(), prompt=np.ones(10, np.int32), _response=20, _cores=Cores(8, 2))
    own.config.rollout.batch_size, own.config.rollout.n_samples_per_prompt = 64, 4
    own.config.train.max_tokens_per_gpu = tokens
    own.roles, own.models = {ACTOR: SimpleNamespace(world=2), ROLLOUT: SimpleNamespace(world=4)}, {ROLLOUT: None}
    own._work = lambda _: SimpleNamespace(update_flops=lambda: flops)
    passes, sampled, seconds = [], [], iter([9.0, 3.0, 1.0, 2.0, 3.5, 1.5, 2.5])

    def pass_over(count: int, backward: bool) -> tuple[Probe, float, float]:
        passes.append((count, backward))
        return Probe(1e9 * count, 1.0 + backward), 5.0 + backward, 9.0 * backward

    def sampling(count: int) -> Probe:
        sampled.append(count)
        return Probe(1e8 * count, next(seconds))

    own._pass, own._sampling = pass_over, sampling
    if not passed:
        with pytest.raises(RunError, match=r"two sequences take 6e\+10 FLOPs .* at most 6e\+10"):
            Measurement.speeds(own)
        assert passes == sampled == []
        return
    found = Measurement.speeds(own)
    assert (passes, sampled) == ([(1, True), (passed, False), (passed, True)], [1, 3, 3, 3, 12, 12, 12])
    large = (Probe(1e9 * passed, 1.0), Probe(1e9 * passed, 2.0))
    gpu, rates = measured(*large, (Probe(3e8, 2.0), Probe(1.2e9, 2.5)), 6.0)
    assert found == Speeds(gpu, Links(9.0, 9.0), rates, own._cores)
