"""Optimizer steps of actor and critic on real ranks: as a program, the rank that torchrun starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from waiting import scaled
from warm_runs import WarmRun

from slurm_rlhf.algorithms.batching import micro_batches, split_ranks
from slurm_rlhf.algorithms.layout import ROWS, Layout
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience

STEPS = 3
LEARNING_RATE = 1e-4  # AdamW turns the rounding of a gradient near zero into a share of this
WARMUP = [LEARNING_RATE * share for share in (1 / 3, 2 / 3, 1)]
TEMPERATURE = 0.7
KL_COEF, TERM_COEF = 0.3, 0.2


def make_config(model: Path, **ds: Any) -> Config:
    config = Config()
    config.actor.model_name_or_path = str(model)
    config.actor.learning_rate = config.critic.learning_rate = LEARNING_RATE
    config.actor.lr_scheduler, config.actor.lr_warmup_ratio = "cosine", 0.5
    config.actor.max_norm = 0.05  # below the norm of every step, so that clipping counts
    config.rollout.temperature = TEMPERATURE
    config.train.logprob_chunk_tokens = 7
    config.train.full_determinism = True
    config.timeout.collective = scaled(60.0)
    config.ds.param_dtype = "fp32"
    for name, value in ds.items():
        setattr(config.ds, name, value)
    return config


def all_terms(config: Config) -> Config:
    """A loss of whole responses with every other term, all of them means of means."""
    actor, kl = config.actor, config.algo.kl
    actor.policy_loss_type, actor.eps_clip_low_high, actor.dual_clip = "gspo", [0.05, 0.1], 1.5
    actor.entropy_coef = actor.nll_coef = TERM_COEF
    kl.use_loss, kl.estimator = True, "k3+"
    return config


def make_experience(step: int, n: int = 8) -> Experience:
    """Ragged sequences, one of them with an empty response, with masked actions in between."""
    rng = np.random.default_rng(step)
    prompts, responses = rng.integers(1, 12, n), rng.integers(1, 14, n)
    responses[step % n] = 0
    actions = int(responses.sum())
    mask = rng.random(actions) > 0.2
    columns = {name: rng.normal(size=actions).astype(np.float32) for name in ("advantages", "returns", "values")}
    columns["logprobs"] = rng.normal(-4.0, 0.5, size=actions).astype(np.float32)
    tokens = rng.integers(2, 69, int((prompts + responses).sum())).astype(np.int32)
    lens = (prompts.astype(np.int32), responses.astype(np.int32))
    return Experience(*lens, tokens, mask, np.zeros(n, np.float32), columns)


def share(
    exp: Experience, rank: int, size: int, max_tokens: int, layout: Layout = ROWS
) -> tuple[Experience, list[list[int]]]:
    group = rank // layout.ranks
    per_group = split_ranks(exp.lengths.tolist(), size // layout.ranks)
    mine = {row: place for place, row in enumerate(per_group[group])}
    micro = micro_batches(per_group, exp.lengths.tolist(), max_tokens * layout.ranks, layout)[group]
    return exp.select(per_group[group]), [[mine[row] for row in rows] for rows in micro]


def train(trainer: Any, steps: range, max_tokens: int) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        exp = make_experience(step)
        denominator = weigh(trainer.config, exp)
        part, micro = share(exp, trainer.world.rank, trainer.world.size, max_tokens, trainer.layout)
        metrics.append(trainer.train_step(part, micro, denominator))
    return metrics


def weigh(config: Config, exp: Experience) -> float:
    """Fill the columns that a step of the conductor sends with the loss of `config`; answer the denominator."""
    from slurm_rlhf.algorithms.methods.reinforce import GROUP_NORM
    from slurm_rlhf.run.experience import fill_correction, fill_loss_weights

    if config.algo.correction.preset != "none":
        log_rho = np.random.default_rng(len(exp.token_ids)).normal(0.3, 0.5, size=len(exp.action_mask))
        exp.columns["rollout_logprobs"] = exp.columns["logprobs"] - log_rho.astype(np.float32)
        fill_correction(config, exp, np.zeros(len(log_rho), dtype=np.int32))
    if config.algo.kl.use_loss:
        rng = np.random.default_rng(len(exp.token_ids))
        exp.columns["ref_logprobs"] = rng.normal(-4.0, 0.5, size=len(exp.action_mask)).astype(np.float32)
        exp.rewards[:] = rng.choice([-1.0, 1.0], len(exp))
    return fill_loss_weights(config, GROUP_NORM, exp, KL_COEF)


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: whole.float().clone() for name, whole in trainer.backend.gathered(trainer.backend.module)}


def assert_held(trainer: Any, zero_stage: int) -> None:
    """Check that each rank has the parts of parameters that it says, and that together the ranks have all of them."""
    from slurm_rlhf.trainer.trainer import DTYPES

    world, held = trainer.world, trainer.local_parameters()
    model = trainer.backend.module.model
    wholes = [(name, whole.clone()) for name, whole in trainer.backend.gathered(model)]
    written = str(DTYPES[trainer.config.ds.param_dtype]).removeprefix("torch.")
    assert trainer.describe() == [(name, list(whole.shape), written) for name, whole in wholes]
    assert set(held) == set(load_file(Path(trainer.config.actor.model_name_or_path) / "model.safetensors"))
    assert list(held) == [name for name, _ in wholes]
    for name, whole in wholes:
        first, mine = held[name]
        whole_flat = whole.reshape(-1)
        step = -(-whole.numel() // world.size) if zero_stage == 3 else whole.numel()
        low = min(world.rank * step, whole.numel()) if zero_stage == 3 else 0
        assert first == low
        assert torch.equal(mine, whole_flat[low : low + step].to(mine.dtype)), name


def assert_checked(trainer: Any, max_tokens: int, param_dtype: str) -> None:
    """Two passes, train and eval mode, and rows alone agree; what is asked changes nothing, as what follows shows."""
    from slurm_rlhf.eval.verdicts import compare
    from slurm_rlhf.run.self_check import few

    exp = few(make_experience(0), trainer.world.size)
    part, micro = share(exp, trainer.world.rank, trainer.world.size, max_tokens, trainer.layout)
    random = torch.get_rng_state()
    found = trainer.self_check(part, micro)
    assert torch.equal(torch.get_rng_state(), random)
    assert trainer.backend.module.training
    assert all(
        compare(name, found[name], found["first"], part.action_mask, param_dtype).passed
        for name in found
        if name != "first"
    )
    assert np.array_equal(found["again"], found["first"])


def run_case(case: dict[str, Any], model: Path, out: Path) -> None:
    from slurm_rlhf.trainer.trainers import PolicyTrainer, ValueTrainer

    scale = {"initial_scale_power": 10}  # for fp16, where no step of these overflows with it
    config = make_config(model, zero_stage=case["zero_stage"], param_dtype=case.get("param_dtype", "fp32"), **scale)
    config.actor.weight_decay = case.get("weight_decay", 0.0)
    if case.get("terms"):
        all_terms(config)
    for name, value in case.get("keys", {}).items():
        put(config, name, value)
    config.actor.gradient_checkpointing_enable = case.get("gradient_checkpointing", False)
    trainer = {"policy": PolicyTrainer, "value": ValueTrainer}[case["kind"]](config, 2 * STEPS)
    if case["kind"] == "policy":
        assert_checked(trainer, case["max_tokens"], case.get("param_dtype", "fp32"))
    metrics = train(trainer, range(STEPS), case["max_tokens"])
    final = parameters(trainer)
    if case["kind"] == "policy":
        assert_held(trainer, case["zero_stage"])
    if trainer.world.rank == 0:
        save_file(final, out / f"{case['name']}.safetensors")
        (out / f"{case['name']}.json").write_text(json.dumps(metrics))


def run_stall(model: Path, out: Path) -> None:
    """Rank 1 never takes its part in the step. Rank 0 writes down how that ended."""
    import time

    from slurm_rlhf.trainer.trainers import PolicyTrainer

    config = make_config(model)
    config.timeout.collective = scaled(2.0)
    trainer = PolicyTrainer(config, STEPS)
    if trainer.world.rank == 1:
        time.sleep(scaled(6.0))
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        train(trainer, range(1), 1000)
    (out / "stall.json").write_text(json.dumps(str(caught.value)))
    os._exit(0)  # at exit, what is left of the group would be waited for


def main(request: dict[str, Any]) -> None:
    model, out = Path(request["model"]), Path(request["out"])
    for case in request.get("cases", []):
        run_case(case, model, out)
    if request.get("stall"):
        run_stall(model, out)


def torchrun(ranks: int, timeout_s: float = 150.0, program: str = __file__, **request: Any) -> None:
    """Run `program` on so many ranks, by a torchrun that is forked with its libraries imported."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", program]
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'support'}",
    }
    process = WarmRun([*command, json.dumps(request)], environment)
    try:
        output, _ = process.communicate(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    assert process.returncode == 0, output[-6000:]


def as_rank(main: Callable[[dict[str, Any]], None]) -> None:
    """Do what was asked for, and leave as a rank of a run does: the teardown of torch and gloo can abort."""
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    as_rank(main)
