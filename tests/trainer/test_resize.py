"""Checkpoints of adapters by one number of ranks, resumed by another, and under another ZeRO stage.

Run as a program, this file is the rank that torchrun starts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from training_ranks import make_config, make_experience, parameters, share, torchrun

pytestmark = pytest.mark.slow

BEFORE, AFTER, SEQUENCES = 2, 2, 12

CASES: list[dict[str, Any]] = [
    {"zero_stage": 2, "param_dtype": "fp32", "kind": "policy"},
    {"zero_stage": 3, "param_dtype": "fp32", "kind": "value"},
    {"zero_stage": 3, "param_dtype": "bf16", "kind": "policy"},
]
MOVES = [(2, 1), (2, 3)]
STAGES = {"policy-zero2-fp32": 3}
"""The same checkpoints, of two ranks, resumed by three under another stage."""

BOUND = {"fp32": 1e-6, "bf16": 5e-4}
"""Of the difference of any element, after four steps of up to 1e-4. AdamW makes a step of a gradient whatever its size,
so that of one that is rounding only it may be any; bf16 rounds gradients to 8 bits before they are added up."""
DRIFT = {"fp32": 1e-5, "bf16": 0.2}
"""Of the difference of all elements, as a share of the way that the parameters go in two steps."""


def name(case: dict[str, Any]) -> str:
    return f"{case['kind']}-zero{case['zero_stage']}-{case['param_dtype']}"


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


def main() -> None:
    request = json.loads(sys.argv[1])
    model, out = Path(request["model"]), Path(request["out"])
    for case in request["cases"]:
        if request["train"]:
            start(case, model, out, request["train"])
        for saved in request["loads"]:
            resume(case, model, out, saved, case["zero_stage"])
            if torch.distributed.get_world_size() == 3 and name(case) in STAGES:
                resume(case, model, out, saved, STAGES[name(case)])


def start(case: dict[str, Any], model: Path, out: Path, steps: int) -> None:
    """Train and save; with more `steps` than that, go on as the undisturbed run."""
    trainer = make(case, model, case["zero_stage"])
    metrics = train(trainer, range(BEFORE))
    directory = out / f"{name(case)}.from{trainer.world.size}"
    directory.mkdir(exist_ok=True)
    trainer.save(directory)
    if steps > BEFORE:
        record(trainer, metrics + train(trainer, range(BEFORE, steps)), out / f"{name(case)}.whole")


def resume(case: dict[str, Any], model: Path, out: Path, saved: int, zero_stage: int) -> None:
    trainer = make(case, model, zero_stage)
    trainer.load(out / f"{name(case)}.from{saved}")
    change = "" if zero_stage == case["zero_stage"] else "staged"
    path = out / f"{name(case)}.from{saved}to{trainer.world.size}{change}"
    record(trainer, [], Path(f"{path}loaded"))
    record(trainer, train(trainer, range(BEFORE, BEFORE + AFTER)), path)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of two ranks has written, and those of one and three that resume it and save, too."""
    path = tmp_path_factory.mktemp("resize")
    make_tiny(path / "model")
    for ranks, steps, loads in ((2, BEFORE + AFTER, []), (1, BEFORE, [2]), (3, BEFORE, [2])):
        launch(path, ranks, steps, loads)
    return path


def launch(path: Path, ranks: int, steps: int, loads: list[int]) -> None:
    request = {"model": str(path / "model"), "out": str(path), "cases": CASES, "train": steps, "loads": loads}
    torchrun(ranks, program=__file__, **request)


def differences(path: Path, other: Path) -> torch.Tensor:
    first, second = load_file(f"{path}.safetensors"), load_file(f"{other}.safetensors")
    assert first.keys() == second.keys()
    return torch.cat([(first[key] - second[key]).abs() for key in first])


def difference(path: Path, other: Path) -> float:
    return float(differences(path, other).max())


def mean_difference(path: Path, other: Path) -> float:
    return float(differences(path, other).mean())


@pytest.mark.parametrize("move", MOVES, ids=lambda move: f"{move[0]}to{move[1]}")
@pytest.mark.parametrize("case", CASES, ids=name)
def test_another_number_of_ranks_goes_on_where_the_run_was(
    out: Path, case: dict[str, Any], move: tuple[int, int]
) -> None:
    assert_goes_on(out, case, *move)


def assert_goes_on(out: Path, case: dict[str, Any], saved: int, now: int) -> None:
    resumed, whole = out / f"{name(case)}.from{saved}to{now}", out / f"{name(case)}.whole"
    assert difference(resumed, whole) < BOUND[case["param_dtype"]]
    way = mean_difference(out / f"{name(case)}.from2to1loaded", whole)
    assert mean_difference(resumed, whole) < DRIFT[case["param_dtype"]] * way
    ours, expected = (json.loads(Path(f"{path}.json").read_text()) for path in (resumed, whole))
    for mine, theirs in zip(ours, expected[BEFORE:], strict=True):
        assert mine["lr"] == theirs["lr"]
        rel = {"fp32": 1e-5, "bf16": 2e-2}[case["param_dtype"]]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=rel)


@pytest.mark.parametrize("case", [case for case in CASES if name(case) in STAGES], ids=name)
def test_another_zero_stage_goes_on_where_the_run_was(out: Path, case: dict[str, Any]) -> None:
    resumed, whole = out / f"{name(case)}.from2to3staged", out / f"{name(case)}.whole"
    assert difference(resumed, whole) < BOUND[case["param_dtype"]]
    way = mean_difference(out / f"{name(case)}.from2to1loaded", whole)
    assert mean_difference(resumed, whole) < DRIFT[case["param_dtype"]] * way


@pytest.mark.parametrize("case", CASES, ids=name)
def test_loading_is_exact_whatever_the_number_of_ranks(out: Path, case: dict[str, Any]) -> None:
    two = [out / f"{name(case)}.from2to{now}loaded" for now in (1, 3)]
    assert difference(*two) == 0
    assert difference(two[0], out / f"{name(case)}.whole") > 0  # two steps lie between them


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as a rank of a run: the interpreter's teardown of torch and gloo can abort
