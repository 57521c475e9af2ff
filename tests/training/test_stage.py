"""Which ZeRO stage an optimizer has; what it computes on one rank is compared with plain AdamW by `test_engine`."""

from __future__ import annotations

import pytest

from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.training.deepspeed_engine import stage_of


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
