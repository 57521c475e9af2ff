"""The policy in training samples under every ZeRO stage, whole or layer by layer, and its training does not notice.

Run as a program, this file is the rank that torchrun starts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_policy import sample
from tiny_models import make_tiny
from training_ranks import make_config, make_experience, share, torchrun

from slurm_rlhf.records import KV_CACHE, WEIGHTS, Experience, Sampling, pack

pytestmark = pytest.mark.slow

CASES = [  # ZeRO stage, precision, whole: gathered once; layer by layer otherwise
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
    from slurm_rlhf.engine.hf import HfEngine, Vocabulary
    from slurm_rlhf.trainer.generation import Generation
    from slurm_rlhf.trainer.trainers import PolicyTrainer

    config = make_config(model, zero_stage=case[0], param_dtype=case[1], fp32_lm_head=case[1] == "bf16")
    config.actor.gradient_checkpointing_enable = True  # which excludes a cache in train mode
    trainer = PolicyTrainer(config, 3)
    world = trainer.world
    generation = Generation(trainer.backend, case[2])
    seen: set[int | str] = set()
    vocabulary = Vocabulary.read(str(model))
    engine = HfEngine(generation, vocabulary, world.device, world.rank, lambda token, doing: seen.add(doing))
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


def main() -> None:
    request = json.loads(sys.argv[1])
    found = {name(tuple(case)): run_case(tuple(case), Path(request["model"])) for case in request["cases"]}
    (Path(request["out"]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("generation")
    model = make_tiny(out / "qwen2")
    torchrun(2, 200.0, __file__, model=str(model), out=str(out), cases=CASES)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_it_samples_with_the_weights_in_training(found: list[dict[str, Any]], case: tuple[int, str, bool]) -> None:
    for rank in found:
        of_case = rank[name(case)]
        assert max(of_case["apart"]) < BOUNDS[case[1]]  # before a step of the optimizer and after it
        assert all(norm > 0 for norm in of_case["trained"])
        assert of_case["layers"] == ([] if case[2] else [0, 1])  # of the model: each is told when it is reached
        assert (of_case["freed"] > 0) is (case[0] == 3 and case[2])  # only gathered parameters are its own


def test_stages_and_ways_of_gathering_sample_the_same(found: list[dict[str, Any]]) -> None:
    """And train the same: the gradient of what follows does not notice that a policy has sampled."""
    for rank in found:
        exact = [rank[name(case)] for case in CASES if case[1] == "fp32"]
        for other in exact[1:]:
            assert other["texts"][0] == exact[0]["texts"][0]
            np.testing.assert_allclose(other["trained"], exact[0]["trained"], rtol=1e-4)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
