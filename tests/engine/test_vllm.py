"""vLLM's settings, and what each architecture needs there."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import rollout_engine as child
import torch
from msgspec.structs import replace
from random_models import ARCHITECTURES, REFUSED, make_model
from rollout_engine import EngineProcess, tokens
from safetensors.torch import save_file

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import RunError
from slurm_rlhf.placement.model_shape import FAMILIES, read_shape, shape_of
from slurm_rlhf.placement.rank_memory import block_bytes, blocks_of_sequence
from slurm_rlhf.records import Sampling, Trajectory
from slurm_rlhf.trainer.models import PolicyModule, load_policy

SAMPLING = Sampling(max_new_tokens=24, temperature=0.9)
EOS = 1


@pytest.fixture(scope="module")
def engine(engine_process: EngineProcess, path: Path) -> EngineProcess:
    engine_process.run(child.start, path, "fp32", 5)
    return engine_process


def test_the_kv_cache_is_as_planned(fresh: EngineProcess, path: Path) -> None:
    made, shape = fresh.run(child.kv_cache), read_shape("actor.model_name_or_path", path)
    assert made["blocks"] == made["bytes"] // block_bytes(shape, 1, 4, made["block"])
    per_sequence = blocks_of_sequence(shape, made["length"], 4096, made["block"])
    assert made["sequences"] == pytest.approx(made["blocks"] / per_sequence)


def test_the_next_turn_of_an_episode_computes_its_new_tokens_only(fresh: EngineProcess) -> None:
    """Whole blocks of what came before it are in the prefix cache, and sampled tokens with them."""
    asked = child.requests(replace(SAMPLING, stop=[]))[-1]
    asked = replace(asked, prompt_ids=asked.prompt_ids[:252], seed=3)
    (turn,) = fresh.run(child.generate, [asked])
    before = fresh.run(child.do, "status")
    ids = np.concatenate([asked.prompt_ids, turn.response_ids, [5, 6, 7]]).astype(np.int32)
    fresh.run(child.generate, [replace(asked, prompt_ids=ids)])
    after = fresh.run(child.do, "status")
    block = fresh.run(child.kv_cache)["block"]
    held = (len(ids) - 4) // block * block  # the last token that was sampled has not been computed with
    assert held > 252, turn.response_ids
    assert after.prompt_tokens - before.prompt_tokens == len(ids)
    assert after.cached_tokens - before.cached_tokens == held


KV_SHAPES = {
    "qwen2": {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128},
    "llama": {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "gemma": {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256},
    "mistral": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 64},
    "gemma3_text": {"num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 64,
                    "sliding_window_pattern": 6, "head_dim": 256},
    "halves": {"num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
               "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 4 + ["full_attention"]},
}  # fmt: skip


def test_kv_blocks_and_sequences_are_those_of_vllm(fresh: EngineProcess) -> None:
    """Vllm's own functions on its own configuration, for the same bytes: shapes, TP sizes, precisions, windows."""
    length = fresh.run(child.kv_cache)["length"]
    cases, expected = [], []
    for name, fields in KV_SHAPES.items():
        family = name if name in FAMILIES else "mistral"
        shape = shape_of(
            {"model_type": family, "hidden_size": 2048, "intermediate_size": 64, "vocab_size": 64, **fields}
        )
        for tp, dtype, size in itertools.product((1, 2, 4), (2, 4), (1 << 30, 7_654_321_987)):
            heads = max(1, shape.kv_heads // tp)
            sizes = {"heads": heads, "width": shape.head_dim, "dtype": dtype, "block": 16, "bytes": size}
            cases.append({"windows": shape.windows, **sizes})
            blocks = size // block_bytes(shape, tp, dtype)
            expected.append((blocks, blocks / blocks_of_sequence(shape, length, 4096)))
    found = fresh.run(child.kv_caches, cases)
    assert [blocks for blocks, _ in found] == [blocks for blocks, _ in expected]
    assert [sequences for _, sequences in found] == pytest.approx([sequences for _, sequences in expected])


def test_length_limits(fresh: EngineProcess) -> None:
    wanted = [r for r in child.requests(replace(SAMPLING, max_new_tokens=300), samples=6) if len(r.prompt_ids) == 260]
    done = fresh.run(child.generate, wanted)
    room = 320 - 260  # data.max_len
    assert max(len(t.response_ids) for t in done) == room
    assert all(t.finish_reason == ("length" if len(t.response_ids) == room else "stop") for t in done)


def test_more_prompt_tokens_at_once_than_a_step_takes(fresh: EngineProcess) -> None:
    """16,640 tokens of prompts, several times vLLM's budget for a step: none of them may be cut for it."""
    short = replace(SAMPLING, max_new_tokens=2)
    long = [request for request in child.requests(short, samples=64) if len(request.prompt_ids) == 260]
    # All different from the first token on: nothing comes out of the prefix cache.
    wanted = [replace(request, prompt_ids=(request.prompt_ids + i) % 62) for i, request in enumerate(long)]
    together = fresh.run(child.generate, wanted)
    assert len(together) == 64
    assert tokens(together[:2]) == tokens([t for r in wanted[:2] for t in fresh.run(child.generate, [r])])
    load = fresh.run(child.do, "status")
    assert load.waiting == 0
    assert load.sampled >= sum(len(t.response_ids) for t in together)


def test_keys_are_free_after_a_failed_step_even_if_vllm_cannot_end_its_requests(fresh: EngineProcess) -> None:
    """Tokens that vLLM still samples for them are ignored."""
    wanted = child.requests(SAMPLING)
    for request in wanted:
        fresh.run(child.do, "add", request)
    assert fresh.run(child.fail_once, "abort") == "no abort"
    assert fresh.run(child.generate, []) == []
    done = fresh.run(child.generate, wanted)
    assert len(done) == len(wanted)
    assert fresh.run(child.differences, done, [0], SAMPLING.temperature)[0] < 1e-5


def test_what_the_engine_refuses(fresh: EngineProcess, path: Path) -> None:
    request = child.requests(SAMPLING)[0]
    with pytest.raises(RunError, match=r"'0.0' \(prompt 0, 400 tokens\).*maximum"):
        fresh.run(child.do, "add", replace(request, prompt_ids=np.full(400, 5, np.int32)))
    assert "Valid sizes: 1, 2" in fresh.run(child.refused, path, {"tensor_parallel_size": 4})


def test_models_that_vllm_does_not_run(engine: EngineProcess, path: Path, tmp_path: Path) -> None:
    settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    shutil.copytree(path, tmp_path / "unknown")
    (tmp_path / "unknown" / "config.json").write_text(json.dumps(settings | {"architectures": ["NoSuchLM"]}))
    stated = engine.run(child.refused, tmp_path / "unknown", {})
    assert stated.startswith("ModelError: vLLM does not accept the model in")
    assert "NoSuchLM" in stated
    assert "no such directory" in engine.run(child.refused, tmp_path / "absent", {})


def test_an_engine_is_alone(fresh: EngineProcess) -> None:
    facts = fresh.run(child.isolation)
    assert facts.pop("kv_bytes") < 64 << 20  # the engine may use 1 GiB
    assert facts == {
        "world": 1,
        "rank": 0,
        "shared_memory": [],
        "multiprocessing": "0",
        "in_flight": 1,
        "async": False,
        "policy": "fcfs",
    }


@pytest.mark.parametrize(("dtype", "head"), [("bf16", "bfloat16"), ("fp16", "float32")])
def test_16_bit_engines_take_fp32_weights(engine_process: EngineProcess, path: Path, dtype: str, head: str) -> None:
    """The one in fp16 with the LM head in fp32."""
    engine_process.run(child.start, path, dtype, 0, False, head == "float32")
    assert engine_process.run(child.logits_dtype) == f"torch.{head}"
    engine_process.run(child.update, 1)
    done = engine_process.run(child.generate, child.requests(SAMPLING, samples=2))
    stale, current = (
        engine_process.run(child.differences, done, [0], 0.9)[0],
        engine_process.run(child.differences, done, [1], 0.9)[0],
    )
    assert current < (0.2 if dtype == "bf16" else 0.02)
    assert stale > 5 * current


# --- architectures ----------------------------------------------------------------------------------------------------


MAX_LEN = 320  # as in `rollout_engine.config`
ALWAYS = ("gemma2", "phi3", "mixtral", "olmo2")
"""Soft caps and windows, longrope, experts that are fused in memory, and a class that vLLM takes from transformers."""


def difference(policy: PolicyModule, trajectories: list[Trajectory]) -> float:
    largest = 0.0
    for t in trajectories:
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        prompt = len(t.prompt_ids)
        index = torch.arange(prompt - 1, len(ids) - 1)
        with torch.no_grad():
            ours, _ = policy(ids[None], index, ids[prompt:], child.SAMPLING.temperature)
        largest = max(largest, float(np.abs(ours.numpy() - t.rollout_logprobs).max()))
    return largest


@pytest.mark.parametrize(
    "arch",
    [
        arch if arch in ALWAYS else pytest.param(arch, marks=pytest.mark.full)
        for arch in ARCHITECTURES
        if arch not in REFUSED
    ],
)
def test_the_engine_agrees_with_the_trainer_from_the_start_and_after_an_update(
    engine_process: EngineProcess, tmp_path: Path, arch: str
) -> None:
    path = make_model(tmp_path / "model", arch)
    policy = load_policy(path, Ds(param_dtype="fp32"), 64, max_len=MAX_LEN)
    generator = torch.Generator().manual_seed(1)
    named = [(name, p.detach()) for name, p in policy.model.named_parameters()]
    weights = {name: p + torch.randn(p.shape, generator=generator) * 0.05 for name, p in named}
    save_file(weights, tmp_path / "update.safetensors")
    before, after = engine_process.run(child.sample_before_and_after, path, tmp_path / "update.safetensors")
    at_start = difference(policy, before)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(weights[name])
    updated = difference(policy, after)
    assert at_start < 1e-5
    assert updated < 1e-5
