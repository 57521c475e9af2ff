"""Checks of the acceptance kit: one vLLM engine and the actor's model, in this process, on the first GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import rollout_engine
from kit import Finding, Place
from kit_gpus import device, gpu_environment
from tiny_models import make_tiny

from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Sampling, pack

SHARE = 0.3
"""vllm.gpu_memory_utilization: the actor's model is on the GPU, too."""
NEW_TOKENS = 48
MEAN = {"fp32": 1e-4, "bf16": 6e-2}
LARGEST = {"fp32": 1e-3, "bf16": 0.5}
"""Bounds of |engine - actor| per token. GPUs gave a mean of 1.2e-6 and 6e-6 at most in fp32, 0.020 and 0.16 in bf16;
stale weights are off by 1.2, attention in TF32 by 3e-3."""


def logprobs_fp32(place: Place) -> Finding:
    return _logprobs(place, "fp32")


def logprobs_bf16(place: Place) -> Finding:
    return _logprobs(place, "bf16")


def sleep(place: Place) -> Finding:
    """Sleep, wake, an update: memory went, came back, and the engine has the actor's weights."""
    config = _config(place, "bf16")
    config.train.colocate_all = True
    _start(config)
    actor = _actor(config)
    generate(4)
    before = _free()
    freed = rollout_engine.engine.sleep()
    asleep = _free()
    for part in ("weights", "kv_cache"):
        rollout_engine.engine.wake(part)
    _load(actor, 1)
    mean, largest = _gaps(actor, generate(4))
    figures = {"freed_gib": freed / 2**30, "free_awake_gib": before / 2**30, "free_asleep_gib": asleep / 2**30}
    _bounded(mean, largest, "bf16")
    if place.rehearse:
        return Finding("all calls made; a CPU engine keeps its memory", figures)
    import torch

    total = torch.cuda.mem_get_info()[1]
    assert freed > SHARE * total / 2, f"only {freed / 2**30:.2f} GiB were freed of an engine that may take {SHARE:.0%}"
    return Finding(f"{freed / 2**30:.1f} GiB freed of {total / 2**30:.0f}; right log-probs after waking", figures)


def _logprobs(place: Place, dtype: str) -> Finding:
    """With the weights of the directory, and with others that came by an update."""
    config = _config(place, dtype)
    config.vllm.enforce_eager = dtype == "fp32"  # bf16 shows CUDA graphs as well
    _start(config)
    actor = _actor(config)
    first = generate(4)
    found = [_gaps(actor, first)]
    _disturb(actor)
    stale, _ = _gaps(actor, first)
    _load(actor, 1)
    found.append(_gaps(actor, generate(4)))
    mean, largest = (max(column) for column in zip(*found, strict=True))
    figures = {"mean": mean, "largest": largest, "stale": stale, "limits": [MEAN[dtype], LARGEST[dtype]]}
    print(figures)
    _bounded(mean, largest, dtype)
    assert stale > 3 * MEAN[dtype], f"another policy is only {stale:.2e} away: the comparison would not see old weights"
    # vLLM's model runner: V2 lies in folders of its own, V1 in their parent.
    module = type(rollout_engine.engine._core.llm.model_executor.driver_worker.model_runner).__module__
    runner = f"{'V2' if '.model_runner' in module else 'V1'} ({module})"
    said = f"mean {mean:.1e}, largest {largest:.1e} per token, also after an update; model runner {runner}"
    return Finding(said, figures)


def _bounded(mean: float, largest: float, dtype: str) -> None:
    assert mean <= MEAN[dtype], f"engine and actor differ by {mean:.2e} a token in {dtype}, limit {MEAN[dtype]:g}"
    assert largest <= LARGEST[dtype], f"the largest difference is {largest:.2e} in {dtype}, limit {LARGEST[dtype]:g}"


def _config(place: Place, dtype: str) -> Config:
    os.environ.update(gpu_environment(0))
    rollout_engine.prepare_environment()
    model = make_tiny(Path(place.scratch, "model"), tied=True, hidden=128, heads=2, kv_heads=1, layers=4)
    config = rollout_engine.config(model, dtype)
    config.vllm.gpu_memory_utilization = SHARE
    config.vllm.enforce_eager = True
    config.vllm.cpu_kvcache_gib = 0.25
    return config


def _start(config: Config) -> None:
    from slurm_rlhf.engine.vllm import VllmEngine

    rollout_engine.engine = VllmEngine(config)


def generate(samples: int) -> list[Any]:
    """Trajectories of `rollout_engine.requests`."""
    wanted = rollout_engine.requests(Sampling(max_new_tokens=NEW_TOKENS), samples, rollout_engine.engine.status.version)
    return rollout_engine.generate(wanted)


def _actor(config: Config) -> Any:
    from slurm_rlhf.trainer.models import load_policy

    return load_policy(config.actor.model_name_or_path, config.ds, chunk_tokens=512).to(device()).eval()


def _disturb(actor: Any) -> None:
    """Another policy: about a third of a weight's usual size on top of each."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in actor.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.03
            parameter.add_(noise.to(parameter))


def _load(actor: Any, version: int) -> None:
    rollout_engine.engine.load(((name, p.detach()) for name, p in actor.model.named_parameters()), version)


def _gaps(actor: Any, trajectories: list[Any]) -> tuple[float, float]:
    """(mean, largest) of |engine - actor| over all sampled tokens."""
    import torch

    from slurm_rlhf.trainer.batch import per_action

    exp = pack(trajectories, [0.0] * len(trajectories))
    micro = [list(range(start, min(start + 8, len(exp)))) for start in range(0, len(exp), 8)]
    ours = per_action(
        exp,
        micro,
        torch.device(device()),
        lambda batch: actor(batch.input_ids, batch.action_index, batch.targets, row=batch.row)[0],
        packed=True,
    )
    gaps = np.abs(ours - exp.columns["rollout_logprobs"])
    assert len(gaps) >= len(trajectories), "the engine sampled next to nothing"
    return float(gaps.mean()), float(gaps.max())


def _free() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
