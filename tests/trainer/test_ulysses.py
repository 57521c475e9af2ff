"""Ranks that compute rows together (ds.ulysses_size), against one rank alone: numbers, gradients, what is refused.

Run as a program, this file is the rank that torchrun starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import make_model
from tiny_models import make_reward
from training_ranks import as_rank, make_config, parameters, share, torchrun

from slurm_rlhf.algorithms.batching import assemble, shards
from slurm_rlhf.algorithms.layout import Layout
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.roles import layout_of
from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.records import Experience

SIZES = ((300, 224), (3, 0), (9, 130), (40, 250), (1, 1), (7, 59))
"""Prompts and responses: 1,024 tokens."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {"model": "qwen2"},
    "zero2": {"model": "qwen2", "ds.zero_stage": 2, "train.full_determinism": True},
    "zero3": {"model": "qwen2", "ds.zero_stage": 3, "train.gradient_checkpointing": "full"},
    "window": {"model": "gemma2", "train.gradient_checkpointing": "selective"},
    "experts": {"model": "qwen3_moe", "train.max_tokens_per_gpu": 150},
    "adapters": {"model": "qwen2", "lora.rank": 4, "actor.entropy_coef": 0.1},
    "value": {"model": "reward"},
    "hpz": {"model": "qwen2", "ds.zero_stage": 3, "ds.hpz_size": 2, "train.max_tokens_per_gpu": 300},
    "bf16": {"model": "qwen2", "ds.param_dtype": "bf16"},
}
"""Last is DeepSpeed's autocast, which changes how later engines of its process add up gradients."""


SIZES_OF = {"plain": [2, 4], "zero3": [2, 4], "window": [4], "value": [4]}
"""Case -> how many ranks compute a row together, where it is not two; there are four in all."""


def batch() -> Experience:
    rng = np.random.default_rng(3)
    prompts, responses = (np.array(column, dtype=np.int32) for column in zip(*SIZES, strict=True))
    tokens, actions = rng.integers(2, 69, int((prompts + responses).sum())).astype(np.int32), int(responses.sum())
    columns = {name: rng.normal(size=actions).astype(np.float32) for name in ("advantages", "returns", "values")}
    columns["logprobs"] = rng.normal(-4.0, 0.5, size=actions).astype(np.float32)
    mask = rng.random(actions) > 0.2
    return Experience(prompts, responses, tokens, mask, np.zeros(len(SIZES), np.float32), columns)


# --- what each rank does ---------------------------------------------------------------------------------------------


def gradients(trainer: Any, exp: Experience, micro: list[list[int]], denominator: float) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_grad

    for number, rows in enumerate(micro, start=1):
        loss, _ = trainer._loss(exp.select(rows), denominator)
        trainer.backend.accumulate(loss, last=number == len(micro))
    plain = trainer.config.ds.zero_stage == 0
    return {
        name: (p.grad if plain else safe_get_full_grad(p)).clone()
        for name, p in trainer.backend.module.named_parameters()
        if p.requires_grad
    }


def compute(name: str, models: Path, size: int) -> dict[str, Any]:
    from slurm_rlhf.trainer.frozen import FrozenPolicy, RewardModel
    from slurm_rlhf.trainer.trainers import PolicyTrainer, ValueTrainer

    case, exp = CASES[name], batch()
    config = make_config(models / case["model"], ulysses_size=size, zero_stage=0)
    config.train.full_determinism = False
    for key, value in case.items():
        if key != "model":
            put(config, key, value)
    config.reward.model_name_or_path = str(models / "reward")
    config.train.logprob_chunk_tokens = 64
    trainer = (ValueTrainer if case["model"] == "reward" else PolicyTrainer)(config, 10)
    everything = [list(range(len(exp)))]
    found: dict[str, Any] = {}
    if isinstance(trainer, PolicyTrainer):
        found["numbers"] = torch.from_numpy(trainer.logprobs(exp, everything)["logprobs"])
        if size > 1:
            np.testing.assert_allclose(FrozenPolicy(config).logprobs(exp, everything)["logprobs"], found["numbers"])
        for passed in trainer.self_check(exp, everything).values():
            np.testing.assert_allclose(passed, found["numbers"], rtol=0, atol=0.2 if name == "bf16" else 1e-4)
    else:
        found["numbers"] = torch.from_numpy(trainer.values(exp, everything)["values"])
        found["scores"] = torch.as_tensor(RewardModel(config).score(exp, [[5, 0, 1], [2, 3, 4]]))
    part, micro = share(exp, trainer.world.rank, trainer.world.size, config.train.max_tokens_per_gpu, trainer.layout)
    found["gradients"] = gradients(trainer, part, micro, 500.0)
    trainer.backend.step()
    found["metrics"] = trainer.train_step(part, micro, 500.0)
    found["after"] = parameters(trainer)
    if "ds.hpz_size" in case:
        assert all(hasattr(p, "ds_secondary_tensor") for p in trainer.backend.module.parameters())
        before = trainer.logprobs(exp, everything)["logprobs"]
        (models / "saved").mkdir(exist_ok=True)
        trainer.backend.save(models / "saved").result()
        trainer.train_step(part, micro, 500.0)
        assert not equal(parameters(trainer), found["after"])
        assert not np.array_equal(trainer.logprobs(exp, everything)["logprobs"], before)
        assert any(p.ds_secondary_tensor is not None for p in trainer.backend.module.parameters())
        trainer.backend.load(models / "saved")
        assert equal(parameters(trainer), found["after"])
        assert np.array_equal(trainer.logprobs(exp, everything)["logprobs"], before)
    return found


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(each, others[name]) for name, each in some.items())


def main(request: dict[str, Any]) -> None:
    for name in CASES:
        for size in [1] if request["alone"] else SIZES_OF.get(name, [2]):
            found = compute(name, Path(request["models"]), size)
            torch.save(found, Path(request["out"]) / f"{name}.{size}.{os.environ['RANK']}")


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ulysses")
    for arch in ("qwen2", "gemma2", "qwen3_moe"):
        make_model(path / arch, arch, noisy=False, num_attention_heads=4, num_key_value_heads=2)
    make_reward(path / "reward", heads=4, hidden=128, kv_heads=1)
    torchrun(1, 120.0, __file__, models=str(path), out=str(path), alone=True)
    torchrun(4, 240.0, __file__, models=str(path), out=str(path), alone=False)
    return path


def close(ours: Any, theirs: Any, bound: float = 1e-5) -> None:
    theirs = torch.as_tensor(theirs)
    torch.testing.assert_close(torch.as_tensor(ours), theirs, rtol=0, atol=bound * max(1.0, float(theirs.abs().max())))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [(name, size) for name in CASES for size in SIZES_OF.get(name, [2])])
def test_numbers_and_gradients_are_those_of_one_rank(out: Path, name: str, size: int) -> None:
    one, *ranks = (
        torch.load(out / found, weights_only=True)
        for found in (f"{name}.1.0", *(f"{name}.{size}.{rank}" for rank in range(4)))
    )
    bound = 0.05 if name == "bf16" else 1e-5
    for found in ranks:
        for key in ("numbers", "scores"):
            if key in one:
                close(found[key], one[key], bound)
        assert found["gradients"].keys() == one["gradients"].keys()
        largest = max(float(grad.norm()) for grad in one["gradients"].values())
        for key, grad in one["gradients"].items():
            gap = float((found["gradients"][key] - grad).norm())
            assert gap <= bound * max(float(grad.norm()), 1e-2 * largest), key
        for key, value in one["after"].items():
            close(found["after"][key], value, 1e-5 if bound == 1e-5 else 1e-3)
    for key, value in one["metrics"].items():
        each = [found["metrics"][key] for found in ranks]
        stated = each[0] if key in ("lr", "grad_norm", "skipped_steps") else sum(each)
        assert stated == pytest.approx(value, rel=20 * bound, abs=1e-3), key


@pytest.mark.fast
def test_ranks_of_a_group_get_the_same_part_and_budgets_are_a_ranks() -> None:
    exp = batch()
    parts = shards(exp, 4, 150, Layout(packed=True, ranks=2))
    assert [part.indices for part in parts[::2]] == [part.indices for part in parts[1::2]]
    assert sorted(row for part in parts[::2] for row in part.indices) == list(range(len(exp)))
    for part in parts:
        sizes = [sum(int(part.experience.lengths[row]) for row in rows) for rows in part.micro]
        assert all(tokens <= 300 or len(rows) == 1 for tokens, rows in zip(sizes, part.micro, strict=True))
        assert max(sizes) > 150
    column = np.arange(int(exp.action_offsets[-1]), dtype=np.float32)
    of_ranks = [column[exp.actions_of(part.indices)] for part in parts]
    assert np.array_equal(assemble(exp, parts, of_ranks), column)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("ds", "message"),
    [
        ({"ulysses_size": 3}, r"ds\.ulysses_size = 3 does not divide the 4 attention heads .* Valid sizes: 1, 2, 4"),
        ({"packing_samples": "never"}, r"ds\.ulysses_size = 2 cuts rows .* ds\.packing_samples = never"),
        ({"attn_implementation": "flash_attention_2"}, r"ds\.ulysses_size = 2 .* ds\.attn_implementation = flash"),
    ],
)
def test_what_excludes_it_is_named(tmp_path: Path, ds: dict[str, Any], message: str) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": 4}))
    assert layout_of(Ds(ulysses_size=2), str(path)).ranks == 2
    with pytest.raises(ConfigError, match=message):
        layout_of(Ds(**{"ulysses_size": 2} | ds), str(path))


if __name__ == "__main__":
    as_rank(main)
