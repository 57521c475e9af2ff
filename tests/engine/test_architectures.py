"""vLLM's log-probs of what it samples against the trainer's, from the directory and after an update of all weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rollout_engine as child
import torch
from random_models import ARCHITECTURES, REFUSED, make_model
from rollout_engine import EngineProcess
from safetensors.torch import save_file

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.records import Trajectory
from slurm_rlhf.trainer.models import PolicyModule, load_policy

MAX_LEN = 320  # of `rollout_engine.config`
ALWAYS = ("gemma2", "phi3", "mixtral", "olmo2")
"""Soft caps and windows, longrope, experts that are fused in memory, and a class that vLLM takes from transformers."""


def difference(policy: PolicyModule, trajectories: list[Trajectory]) -> float:
    largest = 0.0
    for t in trajectories:
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        prompt = len(t.prompt_ids)
        index = torch.arange(prompt - 1, len(ids) - 1)
        with torch.no_grad():
            ours, _ = policy(ids[None], index, ids[prompt:], child.SAMPLING.temperature)
        largest = max(largest, float(np.abs(ours.numpy() - t.rollout_logprobs).max()))
    return largest


@pytest.mark.parametrize(
    "arch",
    [
        arch if arch in ALWAYS else pytest.param(arch, marks=pytest.mark.full)
        for arch in ARCHITECTURES
        if arch not in REFUSED
    ],
)
def test_the_engine_agrees_with_the_trainer_from_the_start_and_after_an_update(
    engine_process: EngineProcess, tmp_path: Path, arch: str
) -> None:
    path = make_model(tmp_path / "model", arch)
    policy = load_policy(path, Ds(param_dtype="fp32"), 64, max_len=MAX_LEN)
    generator = torch.Generator().manual_seed(1)
    named = [(name, p.detach()) for name, p in policy.model.named_parameters()]
    weights = {name: p + torch.randn(p.shape, generator=generator) * 0.05 for name, p in named}
    save_file(weights, tmp_path / "update.safetensors")
    before, after = engine_process.run(child.sample_before_and_after, path, tmp_path / "update.safetensors")
    at_start = difference(policy, before)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(weights[name])
    updated = difference(policy, after)
    print(f"{arch}: {at_start:.1e} from the start, {updated:.1e} after an update")
    assert at_start < 1e-5
    assert updated < 1e-5
