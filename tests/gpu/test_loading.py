"""Models that are loaded for a GPU: where they are compared, in which precision, and by which attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_standins import check_signature, fake_cuda
from tiny_models import make_tiny
from torch import Tensor

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.trainer import batch, models
from slurm_rlhf.trainer.backends import loading
from slurm_rlhf.trainer.distributed import World
from slurm_rlhf.trainer.models import load_policy

pytestmark = [pytest.mark.usefixtures("own_environment")]

GPU = torch.device("cuda", 1)


def read_before(path: Path, ds: Ds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the weights in memory already: transformers makes models on torch's meta device, which has no stand-in."""
    from transformers import AutoModelForCausalLM

    read = models._from_pretrained(AutoModelForCausalLM, path, ds)

    def again(kind: Any, path: Path, ds: Ds) -> Any:
        return read

    check_signature(models._from_pretrained, again)
    monkeypatch.setattr(models, "_from_pretrained", again)


@pytest.mark.parametrize(("stage", "head"), [(0, 32), (2, 256), (2, 264)])
def test_a_model_is_compared_on_its_gpu_as_it_trains(
    stage: int, head: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At stage 0 its parameters are fp32 under autocast, and rotations leave queries and keys in fp32.

    Flash attention takes no larger heads than of 256 dimensions.
    """
    ds, world = Ds(zero_stage=stage, param_dtype="bf16"), World(0, 1, GPU)
    make_tiny(tmp_path / "m", layers=1, hidden=2 * head)
    with loading(ds, World(0, 1, torch.device("cpu"))) as stored:
        read_before(tmp_path / "m", stored, monkeypatch)
        assert torch.is_autocast_enabled("cpu") is (stage == 0)
    calls: list[Any] = []

    def flash(
        query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float | None, window: int | None
    ) -> Tensor:
        assert longest == max(bounds.diff())
        calls.append({(tensor.device, tensor.dtype) for tensor in (query, key, value)})
        return alone(query, key, value, bounds)

    check_signature(batch._flash, flash)
    monkeypatch.setattr(batch, "_flash", flash)
    monkeypatch.setenv("LOCAL_RANK", "1")
    on_cpu = torch.autocast("cpu", torch.bfloat16, enabled=not stage)  # it computes where the stand-ins do
    with fake_cuda(["GPU-a", "GPU-b"]), on_cpu, loading(ds, world) as stored:
        policy = load_policy(tmp_path / "m", stored, 7)
        assert {parameter.device for parameter in policy.parameters()} == {GPU}
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16 if stage else torch.float32}
    assert calls == [{(GPU, torch.bfloat16)}] * (2 if head <= 256 else 0)


def alone(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Each sequence by itself, [1, L, H, D]."""
    sizes = bounds.diff().tolist()
    parts = zip(*(tensor.split(sizes, dim=2) for tensor in (q, k, v)), strict=True)
    return torch.cat([batch._causal(*part, None, None, None) for part in parts], dim=2).transpose(1, 2)
