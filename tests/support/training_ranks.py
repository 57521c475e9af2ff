"""Optimizer steps of actor and critic on real ranks: as a program, the rank that torchrun starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from warm_runs import WarmRun

from slurm_rlhf.algorithms.batching import micro_batches, split_ranks
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CheckpointError, RunError
from slurm_rlhf.records import Experience

STEPS = 3
LEARNING_RATE = 1e-4  # AdamW turns the rounding of a gradient near zero into a share of this
WARMUP = [LEARNING_RATE * share for share in (1 / 3, 2 / 3, 1)]
TEMPERATURE = 0.7


def make_config(model: Path, **ds: Any) -> Config:
    config = Config()
    config.actor.model_name_or_path = str(model)
    config.actor.learning_rate = config.critic.learning_rate = LEARNING_RATE
    config.actor.lr_scheduler, config.actor.lr_warmup_ratio = "cosine", 0.5
    config.actor.max_norm = 0.05  # below the norm of every step, so that clipping counts
    config.rollout.temperature = TEMPERATURE
    config.train.logprob_chunk_tokens = 7
    config.train.full_determinism = True
    config.timeout.collective = 60.0
    config.ds.param_dtype = "fp32"
    for name, value in ds.items():
        setattr(config.ds, name, value)
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


def share(exp: Experience, rank: int, size: int, max_tokens: int) -> tuple[Experience, list[list[int]]]:
    per_rank = split_ranks(exp.lengths.tolist(), size)
    mine = {row: place for place, row in enumerate(per_rank[rank])}
    micro = micro_batches(per_rank, exp.lengths.tolist(), max_tokens)[rank]
    return exp.select(per_rank[rank]), [[mine[row] for row in rows] for rows in micro]


def train(trainer: Any, steps: range, max_tokens: int) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        exp = make_experience(step)
        part, micro = share(exp, trainer.world.rank, trainer.world.size, max_tokens)
        metrics.append(trainer.train_step(part, micro, float(exp.action_mask.sum())))
    return metrics


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    from slurm_rlhf.training.parameters import full_parameters

    return {name: whole.float().clone() for name, whole in full_parameters(trainer.engine.module)}


def assert_held(trainer: Any, zero_stage: int) -> None:
    """What a rank says it has of each parameter is that part of the whole, and together the ranks have all of it."""
    from slurm_rlhf.training.parameters import full_parameters

    world, held = trainer.world, trainer.local_parameters()
    wholes = [(name, whole.reshape(-1).clone()) for name, whole in full_parameters(trainer.engine.module.model)]
    assert list(held) == [name for name, _ in wholes]
    for name, whole in wholes:
        first, mine = held[name]
        step = -(-whole.numel() // world.size) if zero_stage == 3 else whole.numel()
        low = min(world.rank * step, whole.numel()) if zero_stage == 3 else 0
        assert first == low
        assert torch.equal(mine, whole[low : low + step].to(mine.dtype)), name


def assert_checked(trainer: Any, max_tokens: int, param_dtype: str) -> None:
    """Two passes, train and eval mode, and rows alone agree; what is asked changes nothing, as what follows shows."""
    from slurm_rlhf.controller.self_check import few
    from slurm_rlhf.controller.verdicts import compare

    exp = few(make_experience(0), trainer.world.size)
    part, micro = share(exp, trainer.world.rank, trainer.world.size, max_tokens)
    random = torch.get_rng_state()
    found = trainer.self_check(part, micro)
    assert torch.equal(torch.get_rng_state(), random)
    assert trainer.engine.module.training
    assert all(
        compare(name, found[name], found["first"], part.action_mask, param_dtype).passed
        for name in found
        if name != "first"
    )
    assert np.array_equal(found["again"], found["first"])


def run_case(case: dict[str, Any], model: Path, out: Path) -> None:
    from slurm_rlhf.training.trainers import PolicyTrainer, ValueTrainer

    config = make_config(model, zero_stage=case["zero_stage"], param_dtype=case.get("param_dtype", "fp32"))
    config.actor.weight_decay = case.get("weight_decay", 0.0)
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


def run_resume(model: Path, out: Path, zero_stage: int, param_dtype: str) -> None:
    """Six steps at once, and three, a save, a new trainer, a load and three more."""
    from slurm_rlhf.training.trainers import PolicyTrainer

    config = make_config(model, zero_stage=zero_stage, param_dtype=param_dtype)
    whole = PolicyTrainer(config, 2 * STEPS)
    first = train(whole, range(STEPS), 40)
    directory = out / f"checkpoint{whole.world.size}.{zero_stage}"
    directory.mkdir(exist_ok=True)
    whole.save(directory)
    last = train(whole, range(STEPS, 2 * STEPS), 40)
    draw, expected = torch.rand(3), parameters(whole)

    resumed = PolicyTrainer(config, 2 * STEPS)
    assert train(resumed, range(STEPS), 40) == first, "the same steps in the same process differ from run to run"
    resumed.load(directory)
    if zero_stage >= 2:
        offload_and_reload(resumed)
    assert train(resumed, range(STEPS, 2 * STEPS), 40) == last
    assert torch.equal(torch.rand(3), draw)
    for name, value in parameters(resumed).items():
        assert torch.equal(value, expected[name]), name
    with pytest.raises(CheckpointError, match="not a checkpoint of this role"):
        resumed.load(out)


def offload_and_reload(trainer: Any) -> None:
    """As on a GPU, where parked states are other memory than before: what still looked at the old one reads NaN."""
    from slurm_rlhf.training import optimizer_state

    def elsewhere(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = tensor.to(device, copy=True)
        tensor.fill_(float("nan"))
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_state, "_at", elsewhere)
        before = parameters(trainer)
        trainer.engine.sleep()
        if trainer.engine.cfg.zero_stage == 3:
            assert trainer.engine._engine.optimizer.grad_partitions_flat_buffer.untyped_storage().nbytes() == 0
        assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
        trainer.engine.wake_up()


def run_nan(model: Path, zero_stage: int) -> None:
    from slurm_rlhf.training.trainers import PolicyTrainer

    trainer = PolicyTrainer(make_config(model, zero_stage=zero_stage), STEPS)
    before = parameters(trainer)
    exp = make_experience(0)
    exp.columns["advantages"][np.flatnonzero(exp.action_mask)[0]] = np.nan
    part, micro = share(exp, trainer.world.rank, trainer.world.size, 40)
    with pytest.raises(RunError, match="not finite"):
        trainer.train_step(part, micro, float(exp.action_mask.sum()))
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())


def run_stall(model: Path, out: Path) -> None:
    """Rank 1 never takes its part in the step. Rank 0 writes down how long it waited."""
    import time

    from slurm_rlhf.training.trainers import PolicyTrainer

    config = make_config(model)
    config.timeout.collective = 2.0
    trainer = PolicyTrainer(config, STEPS)
    if trainer.world.rank == 1:
        time.sleep(6.0)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train(trainer, range(1), 1000)
    (out / "stall.json").write_text(json.dumps([time.monotonic() - start, str(caught.value)]))
    os._exit(0)  # at exit, what is left of the group would be waited for


def main() -> None:
    request = json.loads(sys.argv[1])
    model, out = Path(request["model"]), Path(request["out"])
    for zero_stage, param_dtype in request.get("resume", []):
        run_resume(model, out, zero_stage, param_dtype)
    for case in request.get("cases", []):
        run_case(case, model, out)
    for zero_stage in request.get("nan", []):
        run_nan(model, zero_stage)
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


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as a rank of a run: the interpreter's teardown of torch and gloo can abort
