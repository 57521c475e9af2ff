"""A check of the acceptance kit: layers computed in other ways, by the log-probs and gradients that they give."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kit import Finding, Place
from kit_gpus import gpu_environment
from packed_rows import make_experience
from tiny_models import make_tiny

LENGTHS = [(3, 9), (12, 1), (1, 30), (5, 44), (4, 20)]
"""Prompts and responses of a packed row."""
WAYS: dict[str, dict[str, Any]] = {
    "ds.compile": {"compile": True},
    "ds.use_liger_kernel": {"use_liger_kernel": True},
    "flash_attention_2": {"attn_implementation": "flash_attention_2"},
    "flash_attention_3": {"attn_implementation": "flash_attention_3"},
}
LIMITS = {"fp32": (1e-4, 1e-3), "bf16": (6e-2, 0.1)}
"""Limits of differences: log-probs in the mean (as in kit_engine), and gradients as a share of their norm."""


def layers(place: Place) -> Finding:
    """Compiled, with Liger's kernels and with flash attention by its names, against none of them.

    What the machine lacks is named. A CPU has the compiler alone.
    """
    from slurm_rlhf.errors import UserError

    os.environ.update(gpu_environment(0))
    dtype = "fp32" if place.rehearse else "bf16"
    model = make_tiny(Path(place.scratch, "model"), hidden=128)
    plain, _ = _passed(model, dtype, {})
    apart: dict[str, Any] = {}
    lacking: dict[str, str] = {}
    for name, keys in WAYS.items():
        try:
            found, seconds = _passed(model, dtype, keys)
        except (UserError, ImportError) as error:
            lacking[name] = " ".join(str(error).split())[:200]
            continue
        gap = float((found[0] - plain[0]).abs().mean())
        turned = float((found[1] - plain[1]).norm() / plain[1].norm())
        apart[name] = {"mean": gap, "gradient": turned, "second_pass_s": seconds}
        assert gap <= LIMITS[dtype][0], f"{name}: log-probs are {gap:.1e} off in {dtype}, limit {LIMITS[dtype][0]:g}"
        assert turned <= LIMITS[dtype][1], f"{name}: gradients are {turned:.1e} off, limit {LIMITS[dtype][1]:g}"
    print(lacking)
    assert "ds.compile" in apart, f"layers cannot be compiled here: {lacking['ds.compile']}"
    said = ", ".join(f"{name} {each['mean']:.1e}" for name, each in apart.items())
    without = f"; not here: {', '.join(lacking)}" if lacking else ""
    return Finding(f"log-probs in {dtype} apart by {said}{without}", {"apart": apart, "lacking": lacking})


def _passed(model: Path, dtype: str, keys: dict[str, Any]) -> tuple[tuple[Any, Any], float]:
    """(log-probs, all gradients in one), and the seconds of a second pass."""
    import torch

    from slurm_rlhf.config.schema import Ds
    from slurm_rlhf.trainer.batch import collate
    from slurm_rlhf.trainer.distributed import local_device
    from slurm_rlhf.trainer.models import load_policy

    policy = load_policy(model, Ds(param_dtype=dtype, **keys), 64, max_len=64).train()
    batch = collate(make_experience(LENGTHS), local_device(), packed=True)
    seconds = 0.0
    for _ in range(2):
        start = time.monotonic()
        policy.zero_grad()
        logprobs, _ = policy(batch.input_ids, batch.action_index, batch.targets, row=batch.row)
        (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
        gradient = torch.cat([p.grad.flatten().float().cpu() for p in policy.parameters() if p.grad is not None])
        seconds = time.monotonic() - start
    return (logprobs.detach().float().cpu(), gradient), seconds
