"""Traffic between ranks that train: collectives and bytes of a step, gathers of the head, ZeRO-3's trace.

Run as a program, this file is the rank that torchrun starts.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_models import make_tiny
from training_ranks import TEMPERATURE, as_rank, make_config, make_experience, torchrun

from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience

pytestmark = pytest.mark.slow

MICROS = 3
CHUNK = 4  # tokens whose logits exist at once
ENTROPY = 0.05
LARGE = 1000  # elements: what is smaller is a norm or a flag
SCALARS = ("all_reduce", "broadcast", "barrier")
COLLECTIVES = (*SCALARS, "reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather", "all_to_all_single")

CASES: list[tuple[int, str, str]] = [  # ZeRO stage, precision of the parameters, in which gradients are added up
    (0, "fp32", "fp32"),
    (1, "fp32", "fp32"),
    (1, "bf16", "bf16"),
    (2, "fp32", "fp32"),
    (2, "bf16", "fp32"),
    (2, "bf16", "bf16"),
    (3, "bf16", "fp32"),
    (3, "bf16", "bf16"),
]


# Tied embeddings or not, activations recomputed or not.
PASSES = [("tied", True), ("untied", False)]
# Tied embeddings or not, ZeRO stage.
GRADIENTS = [("tied", 2), ("tied", 3), ("untied", 3)]


def name(case: tuple[int, str, str]) -> str:
    return f"zero{case[0]}-{case[1]}-sums-in-{case[2]}"


def part_of(rank: int, size: int) -> tuple[Experience, list[list[int]]]:
    """Six rows in three micro-batches. Rank 1's last has no response at all, rank 0's have more chunks than others."""
    exp = make_experience(7, 6 * size)
    rows = sorted(range(len(exp)), key=lambda row: -int(exp.response_lens[row]))
    mine = rows[:6] if rank == 0 else rows[-6:]
    part = exp.select(mine)
    if rank == 1:
        empty = part.response_lens.copy()
        empty[-2:] = 0
        keep = np.repeat(empty > 0, part.response_lens)
        is_prompt = np.concatenate([np.arange(n) < p for n, p in zip(part.lengths, part.prompt_lens, strict=True)])
        tokens = part.token_ids[is_prompt | np.repeat(empty > 0, part.lengths)]
        columns = {key: column[keep] for key, column in part.columns.items()}
        part = Experience(part.prompt_lens, empty, tokens, part.action_mask[keep], part.rewards, columns)
    return part, [[0, 1], [2, 3], [4, 5]]


# --- what each rank does ---------------------------------------------------------------------------------------------


class Wire:
    """Every collective of this process: its name, its largest tensor's elements and its precision."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, str]] = []
        for collective in COLLECTIVES:
            setattr(dist, collective, self._tapped(collective, getattr(dist, collective)))

    def _tapped(self, collective: str, call: Any) -> Any:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            largest = max(tensors, key=lambda tensor: tensor.numel(), default=torch.zeros(0))
            self.heard.append((collective, largest.numel(), str(largest.dtype).removeprefix("torch.")))
            return call(*args, **kwargs)

        return tapped


class Trace:
    """Counts how often ZeRO-3 gathered each parameter and gave up the order of modules that it prefetches by."""

    def __init__(self) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

        self.count: Counter[str] = Counter()
        self.names: dict[int, str] = {}
        gather = "_PartitionedParameterCoordinator__all_gather_params_"
        gathered, invalidated = getattr(Coordinator, gather), Coordinator._invalidate_trace

        def count_gathers(coordinator: Any, params: Any, forward: bool, quantize: bool = False) -> Any:
            for parameter in params:
                if parameter.ds_status.name == "NOT_AVAILABLE":
                    self.count[f"{self.names.get(parameter.ds_id)} {'forward' if forward else 'backward'}"] += 1
            return gathered(coordinator, params, forward, quantize)

        def count_invalid(coordinator: Any) -> Any:
            self.count["invalid"] += 1
            return invalidated(coordinator)

        setattr(Coordinator, gather, count_gathers)
        Coordinator._invalidate_trace = count_invalid

    def take(self) -> dict[str, int]:
        taken, self.count = dict(self.count), Counter()
        return taken


def make_trainer(config: Config) -> Any:
    from slurm_rlhf.trainer.trainers import PolicyTrainer

    config.train.logprob_chunk_tokens = CHUNK
    return PolicyTrainer(config, 10)


def step_of(case: tuple[int, str, str], model: Path, wire: Wire) -> dict[str, Any]:
    """Record what goes over the wire in the second step, when everything is set up."""
    config = make_config(model, zero_stage=case[0], param_dtype=case[1], grad_comm_dtype=case[2])
    trainer = make_trainer(config)
    part, micro = part_of(trainer.world.rank, trainer.world.size)
    trainer.train_step(part, micro, 50.0)
    wire.heard.clear()
    trainer.train_step(part, micro, 50.0)
    heard = list(wire.heard)
    return {"heard": heard, "overlapped": case[0] > 0 and trainer.backend._engine.zero_overlap_comm()}


def passes_of(model: Path, trace: Trace, checkpointing: bool) -> list[dict[str, int]]:
    """Forward passes and a step, three times over: what ZeRO-3 did in each."""
    config = make_config(model, zero_stage=3)
    config.actor.gradient_checkpointing_enable = checkpointing
    trainer = make_trainer(config)
    trace.names = {p.ds_id: key for key, p in trainer.backend.module.named_parameters()}
    part, micro = part_of(trainer.world.rank, trainer.world.size)
    trace.take()
    found = []
    for _ in range(3):
        trainer.logprobs(part, micro)
        found.append(trace.take())
        trainer.train_step(part, micro, 50.0)
        found.append(trace.take())
    return found


def gradients_of(model: Path, zero_stage: int) -> dict[str, torch.Tensor]:
    """Log-probs, entropies and the gradient of a loss of both, summed over micro-batches and ranks."""
    from deepspeed.utils import safe_get_full_grad

    config = make_config(model, zero_stage=zero_stage)
    config.actor.entropy_coef = ENTROPY
    trainer = make_trainer(config)
    part, micro = part_of(trainer.world.rank, trainer.world.size)
    found: dict[str, torch.Tensor] = {}
    for number, rows in enumerate(micro):
        logprobs, entropy = trainer._forward(trainer._collate(part.select(rows)))
        found[f"logprobs.{number}"], found[f"entropy.{number}"] = logprobs.detach(), entropy.detach()
        trainer.backend.accumulate(loss_of(logprobs, entropy), last=number == MICROS - 1)
    for key, parameter in trainer.backend.module.named_parameters():
        found[f"grad.{key}"] = safe_get_full_grad(parameter).clone()
    return found


def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1.0, 1.0, len(logprobs)) if len(logprobs) else logprobs.detach()
    return (logprobs * weights).sum() - ENTROPY * entropy.sum()


def main(request: dict[str, Any]) -> None:
    models, out = Path(request["models"]), Path(request["out"])
    wire = Wire()
    from slurm_rlhf.trainer.distributed import join_world

    world = join_world(60.0, 60.0)
    answers: dict[str, Any] = {name(case): step_of(case, models / "tied", wire) for case in CASES}
    trace = Trace()
    for tied, checkpointing in PASSES:
        answers[f"{tied}.{checkpointing}"] = passes_of(models / tied, trace, checkpointing)
    for tied, zero_stage in GRADIENTS:
        torch.save(gradients_of(models / tied, zero_stage), out / f"{tied}.{zero_stage}.{world.rank}.pt")
    (out / f"{world.rank}.json").write_text(json.dumps(answers))


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("collectives")
    for tied in (True, False):
        make_tiny(path / ("tied" if tied else "untied"), tied=tied)
    torchrun(2, program=__file__, models=str(path), out=str(path))
    return path


@pytest.fixture(scope="module")
def answers(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_gradients_travel_once_a_step_or_behind_each_backward_pass(
    out: Path, answers: list[dict[str, Any]], case: tuple[int, str, str]
) -> None:
    stage, _, wanted = case
    heard = answers[0][name(case)]["heard"]
    assert heard == answers[1][name(case)]["heard"]
    sums = [call for call in heard if call[1] >= LARGE and not call[0].startswith("all_gather")]
    whole = sum(tensor.numel() for tensor in load_file(out / "tied" / "model.safetensors").values())
    precision = {"fp32": "float32", "bf16": "bfloat16"}[wanted]
    collective = "reduce_scatter_tensor" if stage == 3 else "all_reduce"
    assert sums == [[collective, whole, precision]] * (MICROS if stage >= 2 else 1)
    assert answers[0][name(case)]["overlapped"] == (stage > 0)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_no_rank_asks_the_others_for_a_number_in_a_micro_batch(
    answers: list[dict[str, Any]], case: tuple[int, str, str]
) -> None:
    """Small messages are the norm and the flag of one optimizer step; ZeRO-3 also compares its traces."""
    heard = answers[0][name(case)]["heard"]
    assert len([call for call in heard if call[0] == "all_reduce" and call[1] < LARGE]) <= 2
    assert not [call for call in heard if call[0] == "all_reduce" and call[2] == "int64"]


@pytest.mark.parametrize(("tied", "checkpointing"), PASSES, ids=["tied-recomputed", "untied-kept"])
def test_zero3_fetches_the_head_once_a_pass_and_keeps_its_order_of_modules(
    answers: list[dict[str, Any]], tied: str, checkpointing: bool
) -> None:
    head = "model.lm_head.weight" if tied == "untied" else "model.model.embed_tokens.weight"
    for answer in answers:
        first_forward, first_step, *later = answer[f"{tied}.{checkpointing}"]
        # Passes without gradients come first; the order with a backward pass begins like theirs and takes their place.
        assert first_forward.get("invalid", 0) == 0
        assert first_step["invalid"] == 1
        for found in later:
            assert found.get("invalid", 0) == 0
            assert found[f"{head} forward"] == MICROS
        for found in later[1::2]:
            assert found[f"{head} backward"] == MICROS  # the head's is the first of the backward pass
        assert all(f"{head} backward" not in found for found in later[0::2])
        assert later[0] == later[2]
        assert later[1] == later[3]


@pytest.mark.parametrize(("tied", "zero_stage"), GRADIENTS)
def test_chunks_inside_one_call_give_what_plain_logits_give(out: Path, tied: str, zero_stage: int) -> None:
    from transformers import AutoModelForCausalLM

    from slurm_rlhf.trainer.batch import collate

    model = AutoModelForCausalLM.from_pretrained(out / tied, dtype=torch.float32).train()
    ours = [torch.load(out / f"{tied}.{zero_stage}.{rank}.pt") for rank in range(2)]
    chunks = set()
    for rank in range(2):
        part, micro = part_of(rank, 2)
        for number, rows in enumerate(micro):
            batch = collate(part.select(rows), torch.device("cpu"))
            logits = model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)[batch.action_index]
            log_p = (logits / TEMPERATURE).log_softmax(-1)
            logprobs = log_p.gather(-1, batch.targets[:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            torch.testing.assert_close(ours[rank][f"logprobs.{number}"], logprobs.detach(), rtol=0, atol=2e-6)
            torch.testing.assert_close(ours[rank][f"entropy.{number}"], entropy.detach(), rtol=0, atol=2e-6)
            loss_of(logprobs, entropy).backward()
            chunks.add((number, -(-len(logprobs) // CHUNK)))
    assert len({count for number, count in chunks if number == 0}) == 2, "ranks must differ in their chunks"
    assert 0 in {count for _, count in chunks}
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        expected = parameter.grad
        for found in ours:
            torch.testing.assert_close(found[f"grad.model.{key}"], expected, rtol=1e-4, atol=1e-5, msg=key)


if __name__ == "__main__":
    as_rank(main)
