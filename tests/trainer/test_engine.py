"""Optimizer steps on real ranks against plain PyTorch, and the gathered model that samples."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_policy import sample
from policy_loss import policy_loss
from safetensors.torch import load_file
from tiny_models import make_tiny
from training_ranks import (
    KL_COEF,
    LEARNING_RATE,
    TEMPERATURE,
    TERM_COEF,
    WARMUP,
    all_terms,
    as_rank,
    make_config,
    make_experience,
    share,
    torchrun,
    weigh,
)

from slurm_rlhf.algorithms.losses import value_loss
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import KV_CACHE, WEIGHTS, Experience, Sampling, pack

pytestmark = pytest.mark.slow

# --- plain torch -----------------------------------------------------------------------------------------------------


def states(exp: Experience, body: Any) -> torch.Tensor:
    """Hidden states before the actions, one unpadded sequence at a time."""
    rows = []
    for start, prompt, length in zip(exp.token_offsets, exp.prompt_lens, exp.lengths, strict=False):
        ids = torch.tensor(exp.token_ids[start : start + length].astype(np.int64))[None]
        rows.append(body(input_ids=ids, use_cache=False).last_hidden_state[0, prompt - 1 : length - 1])
    return torch.cat(rows)


def plain_loss(kind: str, module: Any, exp: Experience) -> torch.Tensor:
    mask, count = torch.tensor(exp.action_mask), float(exp.action_mask.sum())
    columns = {name: torch.tensor(values) for name, values in exp.columns.items()}
    if kind == "value":
        values = module.value_head(states(exp, module.model)).squeeze(-1)
        return value_loss(values, columns["values"], columns["returns"], mask, count, 0.5)[0]
    offsets, lens = exp.token_offsets, exp.prompt_lens
    targets = np.concatenate([exp.token_ids[offsets[i] + lens[i] : offsets[i + 1]] for i in range(len(exp))])
    logits = module.model.lm_head(states(exp, module.model.model)) / TEMPERATURE
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(-1, torch.tensor(targets.astype(np.int64))[:, None])[:, 0]
    if kind == "terms":
        return all_terms_written_out(logprobs, -(distribution.exp() * distribution).sum(-1), exp)
    if kind in KEYS:
        return loss_written_out(kind, logprobs, exp)
    return policy_loss(logprobs, columns["logprobs"], columns["advantages"], mask, count, 0.2, 0.2)[0]


def all_terms_written_out(logprobs: torch.Tensor, entropy: torch.Tensor, exp: Experience) -> torch.Tensor:
    """GSPO with dual clip and every term: over the whole batch, response by response."""
    weigh(all_terms(Config()), exp)
    columns = {name: torch.tensor(values) for name, values in exp.columns.items()}
    terms, good = [], []
    for row, (start, end) in enumerate(pairwise(exp.action_offsets)):
        chosen = np.flatnonzero(exp.action_mask[start:end]) + start
        if not len(chosen):
            continue
        new, old, advantages, reference = (
            column[chosen] for column in (logprobs, *(columns[n] for n in ("logprobs", "advantages", "ref_logprobs")))
        )
        ratio = (new - old).mean().detach().exp() * (new - new.detach()).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.95, 1.1) * advantages)
        gain = torch.where(advantages < 0, torch.maximum(gain, 1.5 * advantages), gain)
        kl = (new - reference) ** 2 / 2  # the gradient of k3+
        terms.append((-gain + KL_COEF * kl - TERM_COEF * entropy[chosen]).mean())
        if exp.rewards[row] > 0:
            good.append(-TERM_COEF * new)
    return torch.stack(terms).mean() + torch.cat(good).mean()


KEYS: dict[str, dict[str, Any]] = {
    "dppo_tv": {
        "actor.eps_clip_low_high": [0.016, 0.005],
        "actor.loss_agg_mode": "seq-mean-token-sum",
        "algo.correction.preset": "tis",
    },
    "sapo": {"actor.sapo_temperature_pos": 0.5, "actor.sapo_temperature_neg": 3.0},
}
"""Keys of policy losses, by their names; `loss_written_out` has them as numbers. Each bound binds at some tokens."""


def loss_written_out(kind: str, logprobs: torch.Tensor, exp: Experience) -> torch.Tensor:
    """DPPO by sums and with a correction, SAPO by means: response by response."""
    config = Config()
    config.algo.correction.preset = KEYS[kind].get("algo.correction.preset", "none")
    weigh(config, exp)
    columns = {name: torch.tensor(values) for name, values in exp.columns.items()}
    terms = []
    for start, end in pairwise(exp.action_offsets):
        chosen = np.flatnonzero(exp.action_mask[start:end]) + start
        if not len(chosen):
            continue
        new, old, advantages = logprobs[chosen], columns["logprobs"][chosen], columns["advantages"][chosen]
        ratio = (new - old).exp()
        if kind == "sapo":
            tau = torch.where(advantages > 0, 0.5, 3.0)
            terms.append((-4 / tau * (tau * (ratio - 1)).sigmoid() * advantages).mean())
        else:
            moved = new.detach().exp() - old.exp()
            kept = torch.where(advantages > 0, moved <= 0.005, moved >= -0.016)
            rho = (old - columns["rollout_logprobs"][chosen]).exp().clamp(max=2)
            terms.append((-rho * ratio * advantages)[kept].sum())
    return torch.stack(terms).mean()


def plain_torch(kind: str, model: Path, weight_decay: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    from slurm_rlhf.trainer.models import load_critic, load_policy

    config = make_config(model)
    module = load_critic(model, config.ds, 42) if kind == "value" else load_policy(model, config.ds, 1000)
    groups = [
        {"params": [p for p in module.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    norms = []
    for step, lr in enumerate(WARMUP):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        plain_loss(kind, module, make_experience(step)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), config.actor.max_norm)))
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}, norms


# --- the tests -------------------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"name": name, "kind": "policy", "zero_stage": 2, "max_tokens": 40, **changes}
    for name, changes in {
        "whole": {"max_tokens": 10_000},
        "split": {"max_tokens": 30, "weight_decay": 0.1},
        "single": {"max_tokens": 1, "gradient_checkpointing": True},
        "selective": {"max_tokens": 1, "keys": {"train.gradient_checkpointing": "selective"}},
        "zero0": {"zero_stage": 0},
        "zero1": {"zero_stage": 1},
        "zero3": {"zero_stage": 3, "gradient_checkpointing": True, "weight_decay": 0.1},
        "terms": {"max_tokens": 30, "terms": True},
        **{name: {"max_tokens": 30, "keys": {"actor.policy_loss_type": name, **keys}} for name, keys in KEYS.items()},
        "value": {"kind": "value"},
        "bf16": {"param_dtype": "bf16"},
        "fp16": {"param_dtype": "fp16"},
        # Last: DeepSpeed's autocast, once in use, changes how later engines of the same process add up gradients.
        "bf16zero0": {"zero_stage": 0, "param_dtype": "bf16"},
    }.items()
]


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Train on one rank and on two, and return where each has written."""
    outs = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2)}
    for ranks, more in ((1, {}), (2, {"stall": True})):
        torchrun(ranks, 220.0, model=str(model), out=str(outs[ranks]), cases=CASES, **more)
    return outs


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if "param_dtype" not in case], ids=lambda case: case["name"])
def test_training_on_ranks_and_micro_batches_equals_plain_adamw_on_the_whole_batch(
    results: dict[int, Path], model: Path, case: dict[str, Any], ranks: int
) -> None:
    kind = case["name"] if case["name"] in {"terms", *KEYS} else case["kind"]
    expected, norms = plain_torch(kind, model, case.get("weight_decay", 0.0))
    ours = load_file(results[ranks] / f"{case['name']}.safetensors")
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    metrics = json.loads((results[ranks] / f"{case['name']}.json").read_text())
    assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > make_config(model).actor.max_norm
    assert [step["lr"] for step in metrics] == pytest.approx(WARMUP)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["bf16", "bf16zero0", "fp16"])
def test_16_bit_training_stays_close_to_fp32(results: dict[int, Path], model: Path, ranks: int, case: str) -> None:
    start = load_file(model / "model.safetensors")
    moved = {}
    for name in (case, "zero1"):
        ours = load_file(results[ranks] / f"{name}.safetensors")
        moved[name] = torch.cat([(ours[f"model.{key}"] - value).flatten() for key, value in start.items()])
    assert moved["zero1"].abs().max() > LEARNING_RATE
    # bf16 keeps 8 bits of weights of about 0.1: errors of up to 4e-4; fp16 keeps 11.
    assert (moved[case] - moved["zero1"]).abs().median() < (5e-5 if case == "fp16" else 4e-4)


def test_a_rank_that_stalls_is_noticed_within_the_collective_timeout(results: dict[int, Path]) -> None:
    assert "timed out" in json.loads((results[2] / "stall.json").read_text()).lower()  # the other rank left later


# --- generation -------------------------------------------------------------------------------------------------------


GATHERED = [  # ZeRO stage, precision, whole: gathered once; layer by layer otherwise
    (2, "fp32", True),
    (3, "fp32", True),
    (3, "fp32", False),
    (3, "bf16", False),
    # Last: DeepSpeed's autocast changes how later engines of the same process add up.
    (0, "bf16", True),
]
BOUNDS = {"fp32": 1e-5, "bf16": 0.1}


def name(case: tuple[int, str, bool]) -> str:
    return f"zero{case[0]}-{case[1]}-{'whole' if case[2] else 'layers'}"


def requests(rank: int) -> list[Any]:
    from slurm_rlhf.engine.engine import GenerateRequest, request_seed

    rng, made = np.random.default_rng(0), []
    for prompt in range(6):
        ids = rng.integers(2, 69, rng.integers(1, 12)).astype(np.int32)
        sampling = Sampling(temperature=0.7, max_new_tokens=10)
        made.append(GenerateRequest(str(prompt), prompt, 0, ids, sampling, request_seed(42, prompt, 0, 0)))
    return made[:4] if rank == 0 else made[4:]


def sampled(engine: Any, rank: int) -> Experience:
    found, _ = sample(engine, requests(rank))
    return pack(found, [0.0] * len(found))


def wake(engine: Any, generation: Any, version: int) -> None:
    for part in (WEIGHTS, KV_CACHE):
        engine.wake(part)
    engine.load(generation.weights(), version)


def run_case(case: tuple[int, str, bool], model: Path) -> dict[str, Any]:
    """Sample, train a step, sample again: how far its log-probs are from the trainer's, and what has changed."""
    from slurm_rlhf.data.tokenizer import Tokenizer
    from slurm_rlhf.engine.hf import HfEngine
    from slurm_rlhf.trainer.generation import Generation
    from slurm_rlhf.trainer.trainers import PolicyTrainer

    config = make_config(model, zero_stage=case[0], param_dtype=case[1], fp32_lm_head=case[1] == "bf16")
    config.actor.gradient_checkpointing_enable = True  # it excludes a cache in train mode
    trainer = PolicyTrainer(config, 3)
    world = trainer.world
    generation = Generation(trainer.backend, case[2])
    seen: set[int | str] = set()
    engine = HfEngine(generation, Tokenizer.load(model), world.device, world.rank, lambda token, doing: seen.add(doing))
    random, modes = torch.get_rng_state(), [part.training for part in trainer.backend.module.modules()]
    found: dict[str, Any] = {"apart": [], "texts": [], "trained": []}
    for step in range(2):
        wake(engine, generation, step)
        exp = sampled(engine, world.rank)
        assert torch.equal(torch.get_rng_state(), random)
        assert [part.training for part in trainer.backend.module.modules()] == modes
        rows = [list(range(len(exp)))] if case[0] != 3 else [[0], list(range(1, len(exp)))]
        own = trainer.logprobs(exp, rows)["logprobs"]
        found["apart"].append(float(np.abs(own - exp.columns["rollout_logprobs"]).max()))
        found["texts"].append([part.tolist() for part in np.split(exp.token_ids, exp.token_offsets[1:-1])])
        found["layers"] = sorted(doing for doing in seen if isinstance(doing, int))
        part, micro = share(make_experience(step), world.rank, world.size, 40)
        found["freed"] = engine.sleep()
        found["trained"].append(trainer.train_step(part, micro, 50.0)["grad_norm"])
        random = torch.get_rng_state()
    return found


def main(request: dict[str, Any]) -> None:
    found = {name(tuple(case)): run_case(tuple(case), Path(request["model"])) for case in request["cases"]}
    (Path(request["out"]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("generation")
    model = make_tiny(out / "qwen2")
    torchrun(2, 200.0, __file__, model=str(model), out=str(out), cases=GATHERED)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", GATHERED, ids=name)
def test_it_samples_with_the_weights_in_training(found: list[dict[str, Any]], case: tuple[int, str, bool]) -> None:
    for rank in found:
        of_case = rank[name(case)]
        assert max(of_case["apart"]) < BOUNDS[case[1]]  # a value before the optimizer's step, one after it
        assert all(norm > 0 for norm in of_case["trained"])
        assert of_case["layers"] == ([] if case[2] else [0, 1])  # layers of the model: each hears when it is reached
        assert (of_case["freed"] > 0) is (case[0] == 3 and case[2])  # only gathered parameters are its own


def test_stages_and_ways_of_gathering_sample_the_same(found: list[dict[str, Any]]) -> None:
    """They train the same, too: the gradient of what follows does not notice that a policy has sampled."""
    for rank in found:
        exact = [rank[name(case)] for case in GATHERED if case[1] == "fp32"]
        for other in exact[1:]:
            assert other["texts"][0] == exact[0]["texts"][0]
            np.testing.assert_allclose(other["trained"], exact[0]["trained"], rtol=1e-4)


if __name__ == "__main__":
    as_rank(main)
