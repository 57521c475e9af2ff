"""Which ZeRO stage an optimizer has, and when plain PyTorch trains."""

from __future__ import annotations

import sys

import pytest
import torch
from loaded_packages import packages_loaded

from slurm_rlhf.config.schema import Config, Ds, Ref
from slurm_rlhf.trainer import frozen
from slurm_rlhf.trainer.trainer import stage_of


@pytest.mark.parametrize(
    ("ds", "ranks", "stage"),
    [
        (Ds(zero_stage=2, param_dtype="fp32"), 1, 0),
        (Ds(zero_stage=1, param_dtype="fp32"), 1, 0),
        (Ds(zero_stage=0, param_dtype="fp32"), 1, 0),
        (Ds(zero_stage=3, param_dtype="fp32"), 1, 3),
        (Ds(zero_stage=2, param_dtype="fp32"), 2, 2),
        (Ds(zero_stage=2, param_dtype="bf16"), 1, 2),
        (Ds(zero_stage=1, param_dtype="fp16"), 1, 1),
        (Ds(zero_stage=2, param_dtype="fp32", enable_sleep=True), 1, 2),
    ],
)
def test_one_rank_in_fp32_has_nothing_to_cut(ds: Ds, ranks: int, stage: int) -> None:
    config = Config(ds=ds)
    assert stage_of(config, ranks) == stage
    config.train.full_determinism = True
    assert stage_of(config, ranks) == ds.zero_stage  # as the checkpoints were made


@pytest.mark.parametrize(("stage", "together", "joined"), [(0, 1, False), (3, 1, True), (0, 2, True)])
def test_a_frozen_model_joins_the_ranks_that_it_is_cut_over(
    stage: int, together: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings: list[object] = []
    monkeypatch.setattr(frozen, "join_world", lambda *limits: meetings.append(limits))
    monkeypatch.setattr(frozen, "sequence_group", lambda *words: None)
    monkeypatch.setattr(frozen, "start_sharded", lambda load, *words: load())
    frozen.Frozen(Config(ds=Ds(ulysses_size=together)), Ref(zero_stage=stage), "fp32", torch.nn.Identity)
    assert bool(meetings) is joined


@pytest.mark.parametrize(
    ("ds", "autocast"),
    [
        (Ds(zero_stage=0, param_dtype="bf16"), torch.bfloat16),
        (Ds(zero_stage=2, param_dtype="bf16"), None),
        (Ds(zero_stage=0, param_dtype="fp32"), None),
    ],
)
def test_a_reference_rounds_as_the_actor_does(
    ds: Ds, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "Frozen", lambda *words: words[-1])
    monkeypatch.setattr(frozen, "layout_of", lambda *words: None)
    assert frozen.FrozenPolicy(Config(ds=ds)).model is autocast


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_rank_that_plain_pytorch_trains_imports_no_other_trainer(deterministic: bool) -> None:
    program = (
        "from slurm_rlhf.config.schema import Config, Ds\n"
        "from slurm_rlhf.trainer.backends import import_trainers\n"
        "config = Config(ds=Ds(param_dtype='fp32'))\n"
        f"config.train.full_determinism = {deterministic}\n"
        "import_trainers(config, 'actor', 1)\n"
    )
    loaded = packages_loaded([sys.executable, "-c", program])
    assert "transformers" in loaded
    assert ("deepspeed" in loaded) is deterministic
