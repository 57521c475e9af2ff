"""Bytes of parameters, gradients and optimizer states: the model's against what two DeepSpeed ranks really hold.

Run as a program, this file is the rank that torchrun starts.
"""

from __future__ import annotations

import gc
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny
from training_ranks import make_config, make_experience, share, torchrun

from slurm_rlhf.config.schema import Config

pytestmark = pytest.mark.slow

RANKS = 2
CASES = [[stage, dtype, kind] for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16") for kind in ("policy", "value")]
SLICE = [case for case in CASES if case[2] == "policy"] + [[stage, "fp16", "policy"] for stage in (1, 2, 3)]
SLICE += [[0, "fp32", "adapter"], [1, "bf16", "adapter"], [2, "bf16", "adapter"], [3, "bf16", "adapter"]]


# --- what each rank does ---------------------------------------------------------------------------------------------


def storages(tensors: Any) -> dict[int, int]:
    """Address -> bytes of the memory behind `tensors`, once each."""
    found = {}
    for tensor in tensors:
        if tensor.device.type != "meta" and tensor.untyped_storage().nbytes():
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def shown(tensors: list[torch.Tensor]) -> int:
    """Bytes of `tensors`, each place once. Of a gradient across two ranks' parts ZeRO-2 in fp32 keeps a view."""
    views: dict[int, dict[int, int]] = {}
    for tensor in tensors:
        views.setdefault(tensor.untyped_storage().data_ptr(), {})[tensor.data_ptr()] = tensor.nbytes
    whole = storages(tensors)
    return sum(min(size, sum(views[place].values())) for place, size in whole.items())


def reachable(*roots: Any) -> list[torch.Tensor]:
    """All tensors that can be reached from `roots` through attributes and containers, and their gradients."""
    skipped = (type, types.ModuleType, types.FunctionType, types.FrameType, types.CodeType)
    seen: set[int] = set()
    found: list[torch.Tensor] = []
    left = list(roots)
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, skipped):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
            if thing.is_leaf and thing.grad is not None:
                left.append(thing.grad)
        left += gc.get_referents(thing)
    return found


def made(model: Path, stage: int, param_dtype: str, kind: str) -> Config:
    config = make_config(model, zero_stage=stage, param_dtype=param_dtype)
    config.lora.rank = 8 if kind == "adapter" else 0
    return config


def measure(stage: int, param_dtype: str, kind: str, model: Path) -> dict[str, int]:
    """Bytes on this rank: the most that gradients are behind a backward pass, the rest after two optimizer steps."""
    from slurm_rlhf.trainer._deepspeed import masters
    from slurm_rlhf.trainer.trainers import PolicyTrainer, ValueTrainer

    config = made(model, stage, param_dtype, kind)
    trainer = (ValueTrainer if kind == "value" else PolicyTrainer)(config, 4)
    engine = trainer.backend
    optimizer = engine.optimizer
    exp = make_experience(0)
    part, micro = share(exp, trainer.world.rank, trainer.world.size, 40)
    parameters = list(engine.module.parameters())
    found: dict[str, int] = {}
    accumulate = engine.accumulate

    def measuring(*arguments: Any, **named: Any) -> None:
        accumulate(*arguments, **named)
        found["gradients"] = max(found.get("gradients", 0), shown(gradients()))

    def gradients() -> list[torch.Tensor]:
        own = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if stage == 3:
            return [optimizer.grad_partitions_flat_buffer]
        own += [sums for parameter in parameters if (sums := getattr(parameter, "grad_accum", None)) is not None]
        kept = reachable(getattr(optimizer, "averaged_gradients", None))
        return [*own, *kept, *(getattr(optimizer, "fp32_groups_gradients_flat", None) or [])]

    engine.accumulate = measuring
    for _ in range(2):
        trainer.train_step(part, micro, float(exp.action_mask.sum()))
    cut = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    held = storages([*parameters, *cut])
    inner = getattr(optimizer, "optimizer", optimizer)
    moments = [value for state in inner.state.values() for value in state.values() if value.numel() > 1]
    optimizer_states = storages([*moments, *(masters(optimizer) if stage else [])])
    found["parameters"] = sum(held.values())
    found["optimizer"] = sum(size for place, size in optimizer_states.items() if place not in held)
    return found


def main() -> None:
    request = json.loads(sys.argv[1])
    results = [measure(*case, Path(request["model"])) for case in request["cases"]]
    if torch.distributed.get_rank() == 0:
        Path(request["out"]).write_text(json.dumps(results))


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that what ZeRO pads is far below one per cent."""
    sizes: dict[str, Any] = {"hidden": 128, "layers": 3, "heads": 4, "kv_heads": 2, "tied": False}
    return make_tiny(tmp_path_factory.mktemp("models") / "qwen2", **sizes)


def compare(model: Path, cases: list[list[Any]], out: Path) -> None:
    from slurm_rlhf.placement.model_shape import read_shape
    from slurm_rlhf.placement.rank_memory import trainer_states

    torchrun(RANKS, program=__file__, model=str(model), out=str(out), cases=cases)
    shape = read_shape("actor.model_name_or_path", model)
    for (stage, dtype, kind), measured in zip(cases, json.loads(out.read_text()), strict=True):
        config = made(model, stage, dtype, kind)
        config.actor.num_gpus_per_node = config.critic.num_gpus_per_node = RANKS
        ours = trainer_states(config, shape, "critic" if kind == "value" else "actor")
        for term, size in measured.items():
            assert getattr(ours, term) == pytest.approx(size, rel=0.01), f"ZeRO-{stage} {dtype} {kind}: {term}"


def test_states_are_those_of_deepspeeds_ranks(model: Path, tmp_path: Path) -> None:
    compare(model, SLICE, tmp_path / "measured.json")


@pytest.mark.full
def test_states_of_the_critic_too(model: Path, tmp_path: Path) -> None:
    compare(model, CASES, tmp_path / "measured.json")


if __name__ == "__main__":
    main()
