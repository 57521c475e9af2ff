"""Optimizer steps of actor and critic under real torchrun and DeepSpeed, against plain torch on one process.

Run as a program, this file is the rank that torchrun starts.
"""

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
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from slurm_rlhf.algorithms.batching import micro_batches, split_ranks
from slurm_rlhf.algorithms.losses import policy_loss, value_loss
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


# --- what each rank does ---------------------------------------------------------------------------------------------


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

    world, held = trainer.world, trainer.held()
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
    from slurm_rlhf.roles.self_check import few
    from slurm_rlhf.roles.verdicts import compare

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
    from slurm_rlhf.training.policy import PolicyTrainer
    from slurm_rlhf.training.value import ValueTrainer

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
    from slurm_rlhf.training.policy import PolicyTrainer

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
        park_and_unpark(resumed)
    assert train(resumed, range(STEPS, 2 * STEPS), 40) == last
    assert torch.equal(torch.rand(3), draw)
    for name, value in parameters(resumed).items():
        assert torch.equal(value, expected[name]), name
    with pytest.raises(CheckpointError, match="not a checkpoint of this role"):
        resumed.load(out)


def park_and_unpark(trainer: Any) -> None:
    """As on a GPU, where parked states are other memory than before: what still looked at the old one reads NaN."""
    from slurm_rlhf.training import offload

    def elsewhere(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = tensor.to(device, copy=True)
        tensor.fill_(float("nan"))
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_at", elsewhere)
        before = parameters(trainer)
        trainer.engine.sleep()
        if trainer.engine.cfg.zero_stage == 3:
            assert trainer.engine._engine.optimizer.grad_partitions_flat_buffer.untyped_storage().nbytes() == 0
        assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
        trainer.engine.wake_up()


def run_nan(model: Path, zero_stage: int) -> None:
    from slurm_rlhf.training.policy import PolicyTrainer

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

    from slurm_rlhf.training.policy import PolicyTrainer

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
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(targets.astype(np.int64))[:, None])[:, 0]
    return policy_loss(logprobs, columns["logprobs"], columns["advantages"], mask, count, 0.2, 0.2)[0]


def plain_torch(kind: str, model: Path, weight_decay: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    from slurm_rlhf.training.models import load_critic, load_policy

    config = make_config(model)
    module = load_policy(model, config.ds, 1000) if kind == "policy" else load_critic(model, config.ds, 42)
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
    {"name": "whole", "kind": "policy", "zero_stage": 2, "max_tokens": 10_000},
    {"name": "split", "kind": "policy", "zero_stage": 2, "max_tokens": 30, "weight_decay": 0.1},
    {"name": "single", "kind": "policy", "zero_stage": 2, "max_tokens": 1, "gradient_checkpointing": True},
    {"name": "zero0", "kind": "policy", "zero_stage": 0, "max_tokens": 40},
    {"name": "zero1", "kind": "policy", "zero_stage": 1, "max_tokens": 40},
    {
        "name": "zero3",
        "kind": "policy",
        "zero_stage": 3,
        "max_tokens": 40,
        "gradient_checkpointing": True,
        "weight_decay": 0.1,
    },
    {"name": "value", "kind": "value", "zero_stage": 2, "max_tokens": 40},
    {"name": "bf16", "kind": "policy", "zero_stage": 2, "max_tokens": 40, "param_dtype": "bf16"},
    # Last: DeepSpeed's autocast, once it was in use, changes how later engines of the same process add up gradients.
    {"name": "bf16zero0", "kind": "policy", "zero_stage": 0, "max_tokens": 40, "param_dtype": "bf16"},
]
RESUMES = [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")]


def torchrun(ranks: int, timeout_s: float = 150.0, program: str = __file__, **request: Any) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", program]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    process = subprocess.Popen(
        [*command, json.dumps(request)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    assert process.returncode == 0, output[-6000:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What one rank and two ranks have written; `nan` and `resume` are asserted by the ranks themselves."""
    outs = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2)}
    torchrun(1, model=str(model), out=str(outs[1]), cases=CASES, resume=[[2, "bf16"]], nan=[0, 2])
    torchrun(2, model=str(model), out=str(outs[2]), cases=CASES, resume=RESUMES, nan=[0, 2], stall=True)
    return outs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if "param_dtype" not in case], ids=lambda case: case["name"])
def test_training_on_ranks_and_micro_batches_equals_plain_adamw_on_the_whole_batch(
    results: dict[int, Path], model: Path, case: dict[str, Any], ranks: int
) -> None:
    expected, norms = plain_torch(case["kind"], model, case.get("weight_decay", 0.0))
    ours = load_file(results[ranks] / f"{case['name']}.safetensors")
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    metrics = json.loads((results[ranks] / f"{case['name']}.json").read_text())
    assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > make_config(model).actor.max_norm
    assert [step["lr"] for step in metrics] == pytest.approx(WARMUP)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["bf16", "bf16zero0"])
def test_bf16_training_stays_close_to_fp32(results: dict[int, Path], model: Path, ranks: int, case: str) -> None:
    start = load_file(model / "model.safetensors")
    moved = {}
    for name in (case, "zero1"):
        ours = load_file(results[ranks] / f"{name}.safetensors")
        moved[name] = torch.cat([(ours[f"model.{key}"] - value).flatten() for key, value in start.items()])
    assert moved["zero1"].abs().max() > LEARNING_RATE
    # bf16 keeps 8 bits of weights of about 0.1: errors of up to 4e-4.
    assert (moved[case] - moved["zero1"]).abs().median() < 4e-4


@pytest.mark.timeout(300)
def test_a_rank_that_stalls_is_noticed_within_the_collective_timeout(results: dict[int, Path]) -> None:
    seconds, message = json.loads((results[2] / "stall.json").read_text())
    assert 1.5 < seconds < 4.5, message
    assert "timed out" in message.lower()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as a rank of a run: the interpreter's teardown of torch and gloo can abort
