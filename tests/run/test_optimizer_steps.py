"""The actor's learning-rate schedule leaves out the steps in which it is frozen."""

from __future__ import annotations

import pytest

from slurm_rlhf.config.schema import Config
from slurm_rlhf.run.startup import optimizer_steps
from slurm_rlhf.trainer.train_settings import Schedule, learning_rate

STEPS = 40


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(("frozen", "epochs"), [(0, 1), (20, 1), (20, 3), (39, 2)])
def test_the_actor_ends_at_the_least_share_of_the_peak_however_long_it_was_frozen(
    kind: str, frozen: int, epochs: int
) -> None:
    config = Config()
    config.critic.freezing_steps, config.train.max_epochs = frozen, epochs
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.train.batch_size = 64, 4, 128
    actor, critic = (optimizer_steps(config, role, STEPS) for role in ("actor", "critic"))
    assert critic == STEPS * epochs * 2
    # An engine counts the steps that it takes: the actor's first one comes behind the frozen ones.
    taken = (STEPS - frozen) * epochs * 2
    schedule = Schedule(kind, 1e-3, actor, 0.0, 0.1)
    assert learning_rate(0, schedule) == pytest.approx(1e-3)
    assert learning_rate(taken - 1, schedule) == pytest.approx(1e-4)
    assert learning_rate(taken - 2, schedule) > 1e-4


def test_a_run_that_is_frozen_to_its_end_has_no_schedule() -> None:
    config = Config()
    config.critic.freezing_steps = 50
    assert optimizer_steps(config, "actor", STEPS) == 0
