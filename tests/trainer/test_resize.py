"""Checkpoints of adapters by one number of ranks, resumed by another, and under another ZeRO stage.

Run as a program, this file is the rank that torchrun starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from training_ranks import as_rank, make_config, make_experience, parameters, share, torchrun

pytestmark = pytest.mark.slow

BEFORE, AFTER, SEQUENCES = 2, 2, 12

CASES: list[dict[str, Any]] = [
    {"zero_stage": 2, "param_dtype": "fp32", "kind": "policy"},
    {"zero_stage": 3, "param_dtype": "fp32", "kind": "value"},
    {"zero_stage": 3, "param_dtype": "bf16", "kind": "policy"},
]
GOES_ON = [*((case, ranks, case["zero_stage"]) for case in CASES for ranks in (1, 3)), (CASES[0], 3, 3)]
"""Case, ranks that resume what two have saved, and their ZeRO stage."""
BOUND = {"fp32": 1e-6, "bf16": 5e-4}
"""Bound of the difference of any element, after four steps of up to 1e-4. AdamW's step does not depend on the size of a
gradient: one that is rounding only may give any step. bf16 rounds gradients to 8 bits before they are added up."""
DRIFT = {"fp32": 1e-5, "bf16": 0.2}
"""Bound of the difference of all elements, as a share of the way that the parameters go in two steps."""


def name(case: dict[str, Any]) -> str:
    return f"{case['kind']}-zero{case['zero_stage']}-{case['param_dtype']}"


def resumed(out: Path, case: dict[str, Any], ranks: int, zero_stage: int) -> Path:
    return out / f"{name(case)}.by{ranks}in{zero_stage}"


def make(case: dict[str, Any], model: Path, zero_stage: int) -> Any:
    from slurm_rlhf.trainer.trainers import PolicyTrainer, ValueTrainer

    config = make_config(model, zero_stage=zero_stage, param_dtype=case["param_dtype"])
    config.lora.rank = 3
    return {"policy": PolicyTrainer, "value": ValueTrainer}[case["kind"]](config, BEFORE + AFTER)


def masters(trainer: Any) -> dict[str, torch.Tensor]:
    """This rank's fp32 elements of every parameter, the others' zero."""
    backend = trainer.backend
    whole = {name: torch.zeros(shape.numel()) for name, shape in backend.shapes.items()}
    for fragment in backend.shards(backend.module, "optimizer"):
        mine = fragment.tensors["fp32"]
        whole[fragment.name][fragment.start : fragment.start + len(mine)] = mine
    return whole


def train(trainer: Any, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        exp = make_experience(step, SEQUENCES)
        part, micro = share(exp, trainer.world.rank, trainer.world.size, 40)
        metrics.append(trainer.train_step(part, micro, float(exp.action_mask.sum())))
    return metrics


def record(trainer: Any, metrics: list[dict[str, float]], path: Path) -> None:
    """The masters of all ranks put together, the parameters the model computes with, and the last step's metrics."""
    whole = masters(trainer)
    for tensor in whole.values():
        torch.distributed.all_reduce(tensor)
    live = {f"live.{name}": tensor.flatten() for name, tensor in parameters(trainer).items()}
    if trainer.world.rank == 0:
        save_file(whole | live, f"{path}.safetensors")
        Path(f"{path}.json").write_text(json.dumps(metrics))


def main(request: dict[str, Any]) -> None:
    out, ranks = Path(request["out"]), int(os.environ["WORLD_SIZE"])
    for case in CASES if ranks == 2 else ():
        start(case, out)
    for case, now, zero_stage in GOES_ON:
        if now == ranks:
            resume(case, out, resumed(out, case, ranks, zero_stage), zero_stage)


def start(case: dict[str, Any], out: Path) -> None:
    """Train, save, and go on as the undisturbed run."""
    trainer = make(case, out / "model", case["zero_stage"])
    train(trainer, range(BEFORE))
    (out / name(case)).mkdir(exist_ok=True)
    trainer.save(out / name(case))
    record(trainer, train(trainer, range(BEFORE, BEFORE + AFTER)), out / f"{name(case)}.whole")


def resume(case: dict[str, Any], out: Path, path: Path, zero_stage: int) -> None:
    trainer = make(case, out / "model", zero_stage)
    trainer.load(out / name(case))
    record(trainer, [], Path(f"{path}.loaded"))
    record(trainer, train(trainer, range(BEFORE, BEFORE + AFTER)), path)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two ranks, and one and three that resume what they saved; return where all have written."""
    path = tmp_path_factory.mktemp("resize")
    make_tiny(path / "model")
    for ranks in (2, 1, 3):
        torchrun(ranks, program=__file__, out=str(path))
    return path


def differences(path: Path, other: Path) -> torch.Tensor:
    first, second = load_file(f"{path}.safetensors"), load_file(f"{other}.safetensors")
    assert first.keys() == second.keys()
    return torch.cat([(first[key] - second[key]).abs() for key in first])


@pytest.mark.parametrize(("case", "ranks", "zero_stage"), GOES_ON)
def test_other_ranks_and_another_zero_stage_go_on_where_the_run_was(
    out: Path, case: dict[str, Any], ranks: int, zero_stage: int
) -> None:
    path, whole, dtype = resumed(out, case, ranks, zero_stage), out / f"{name(case)}.whole", case["param_dtype"]
    apart, way = differences(path, whole), differences(Path(f"{path}.loaded"), whole)
    assert float(apart.max()) < BOUND[dtype]
    assert float(apart.mean()) < DRIFT[dtype] * float(way.mean())
    ours, expected = (json.loads(Path(f"{each}.json").read_text()) for each in (path, whole))
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine["lr"] == theirs["lr"]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel={"fp32": 1e-5, "bf16": 2e-2}[dtype])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_loading_is_exact_whatever_the_number_of_ranks(out: Path, case: dict[str, Any]) -> None:
    one, three = (Path(f"{resumed(out, case, ranks, case['zero_stage'])}.loaded") for ranks in (1, 3))
    assert differences(one, three).max() == 0
    assert differences(one, out / f"{name(case)}.whole").max() > 0  # two steps lie between them


if __name__ == "__main__":
    as_rank(main)
