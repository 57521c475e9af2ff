"""The loss scale of fp16, step by step, what metrics say of skipped steps, and a device without fp16."""

from __future__ import annotations

import math

import pytest
import torch

from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.errors import ConfigError, RunError
from slurm_rlhf.run.update import Trained, skip_warning, update_metrics
from slurm_rlhf.trainer import deepspeed as backend
from slurm_rlhf.trainer._deepspeed import import_deepspeed
from slurm_rlhf.trainer.deepspeed import start_deepspeed
from slurm_rlhf.trainer.distributed import World
from slurm_rlhf.trainer.train_settings import Schedule, TrainSettings
from slurm_rlhf.trainer.trainer import LossScale


def made(power: int = 3, window: int = 2, least: float = 2.0) -> LossScale:
    ds = Ds(param_dtype="fp16", initial_scale_power=power, loss_scale_window=window, min_loss_scale=least)
    scale = LossScale.of(ds)
    assert scale is not None
    return scale


def test_the_scale_by_hand() -> None:
    """8, overflow: 4, two steps: 8, two: 16, a step and an overflow: 8, two: 16."""
    scale, seen = made(), []
    for passed in (0, 1, 1, 1, 1, 1, 0, 1, 1):
        seen.append(scale.scale)
        if passed:
            scale.step_passed()
        else:
            scale.step_overflowed(0)
    assert [*seen, scale.scale] == [8, 4, 4, 8, 8, 16, 16, 8, 8, 16]


def test_overflows_in_a_row_end_at_the_smallest_scale() -> None:
    scale = made(least=3.0)
    scale.step_overflowed(5)
    scale.step_overflowed(5)
    assert scale.scale == 3.0
    with pytest.raises(RunError, match=r"step 5 is not finite, 3 times .* ds\.min_loss_scale = 3;.* ds\.param_dtype"):
        scale.step_overflowed(5)


def test_a_checkpoint_keeps_where_it_was() -> None:
    scale, other = made(), made()
    for _ in range(3):
        scale.step_passed()
    other.load(scale.state())
    assert other == scale != made()


def test_gradients_of_bf16_and_fp32_are_not_scaled() -> None:
    assert LossScale.of(Ds(param_dtype="bf16")) is None
    assert LossScale.of(Ds(param_dtype="fp32")) is None


def test_skipped_steps_are_counted_and_have_no_gradient_norm() -> None:
    skipped = {"loss": 2.0, "lr": 0.1, "loss_scale": 8.0, "skipped_steps": 1.0}
    taken = {"loss": 4.0, "lr": 0.1, "loss_scale": 4.0, "skipped_steps": 0.0, "grad_norm": 3.0}
    steps = [Trained("actor", 2.0, [answer]) for answer in (skipped, skipped, taken)]
    metrics = update_metrics(steps)
    assert metrics["actor_skipped_steps"] == 2.0
    assert metrics["actor_grad_norm"] == 3.0
    assert math.isclose(metrics["actor_loss_scale"], 20 / 3)
    assert "actor_grad_norm" not in update_metrics(steps[:2])


def test_what_is_not_finite_in_a_skipped_step_is_left_out_and_told() -> None:
    nan = math.nan
    skipped = {"loss": nan, "ratio": nan, "approx_kl": nan, "lr": 0.1, "skipped_steps": 1.0}
    taken = {"loss": 4.0, "ratio": 2.0, "approx_kl": 0.0, "lr": 0.1, "skipped_steps": 0.0, "grad_norm": 3.0}
    metrics = update_metrics([Trained("actor", 2.0, [answer, answer]) for answer in (skipped, taken)])
    assert metrics["loss"] == 4.0
    assert metrics["first_ratio"] == 2.0  # nothing has changed since the old log-probs
    assert metrics["actor_skipped_steps"] == 1.0
    assert "1 of the actor. After train.max_skipped_steps" in skip_warning(metrics)
    assert "1 of the actor and 2 of the critic" in skip_warning(metrics | {"critic_skipped_steps": 2.0})
    assert skip_warning(update_metrics([Trained("actor", 2.0, [taken])])) == ""
    assert "first_ratio" not in update_metrics([Trained("actor", 2.0, [skipped])])


@pytest.mark.slow
def test_a_device_without_fp16_is_told_before_a_model_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = import_deepspeed(torch.device("cpu"))
    accelerator = deepspeed.accelerator.get_accelerator()
    assert accelerator.is_fp16_supported()  # as torch computes it on every CPU
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda: False)
    monkeypatch.setattr(backend, "import_deepspeed", lambda device: deepspeed)
    config = Config()
    config.ds.param_dtype = "fp16"
    settings = TrainSettings.of(config, Schedule.of(config, 1e-3, 1), ranks=1)
    with pytest.raises(ConfigError, match=r"ds\.param_dtype = fp16: DeepSpeed does not train in it on this device"):
        start_deepspeed(torch.nn.Linear(1, 1), {}, settings, World(0, 1, torch.device("cpu")))
