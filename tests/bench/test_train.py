"""MFU of `bench train`: the model's FLOPs at the measured rate, over the card's peak."""

from __future__ import annotations

import pytest
from model_configs import SHAPES
from packed_rows import make_experience

from slurm_rlhf.bench.train import utilisation
from slurm_rlhf.placement.model_shape import batch_flops, shape_of


@pytest.mark.parametrize(
    ("gpu", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 0),
        ("some card", "bf16", 0),
        ("", "bf16", 0),
    ],
)
def test_utilisation(gpu: str, dtype: str, peak: float) -> None:
    shape = shape_of(SHAPES["7B"])
    found = utilisation(
        shape, make_experience([(2, 5), (2, 3)]), rate=6.0, dtype=dtype, gpu=gpu
    )  # 12 tokens: two seconds
    flops = batch_flops(shape, [7, 5], backward=True, head_tokens=8)
    assert found["tflops"] == pytest.approx(flops / 2 / 1e12)
    if peak:
        assert found["mfu"] == pytest.approx(flops / 2 / peak)
    else:
        assert found["mfu"] is None
