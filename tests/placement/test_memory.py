"""Estimates of memory: of trainers, of activations, and of an actor that samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rollout_engine as child
import torch
from model_configs import SHAPES, VARIANTS, make_config, make_shape
from rollout_engine import EngineProcess
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from slurm_rlhf.config.keys import get, put
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ACTOR, CRITIC, REFERENCE, REWARD, ROLES, ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.memory import (
    LOWER,
    RAISE,
    WAYS,
    Account,
    account,
    gathers_once,
    help_for,
    rank_memories,
    ways_for,
)
from slurm_rlhf.placement.model_shape import Pass, autocast_weights, read_shape, recomputed, saved, shape_of
from slurm_rlhf.placement.rank_memory import GIB, block_bytes, blocks_of_sequence, hf_terms, states, weights

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
H100 = int(79.1 * GIB)
SEVEN = shape_of(SHAPES["7B"])
MODELS = dict.fromkeys(ROLES, SEVEN)


def config(name: str = "ppo_7b", **changes: object) -> Config:
    made = load_config(SBATCH / f"{name}.toml", [])
    for key, value in changes.items():
        put(made, key.replace("__", "."), value)
    return made


def needed(found: Account, name: str) -> float:
    return next(row.needed for row in found.rows if name in row.name) / GIB


def test_states_by_stage() -> None:
    """Rajbhandari et al., ZeRO (2020), figure 1: 7.5B parameters over 64 GPUs, Adam, here with fp32 gradients."""
    n = 7_500_000_000
    two, three = states(n, 64, 2, "bf16"), states(n, 64, 3, "bf16")
    assert two.parameters == 2 * n
    assert three.parameters == pytest.approx(2 * n / 64, rel=1e-6)
    assert two.optimizer == three.optimizer == pytest.approx(12 * n / 64, rel=1e-6)
    assert two.gradients == pytest.approx(4 * n / 64, rel=1e-6)


def test_an_actor_has_memory_for_the_buckets_it_sends() -> None:
    """Three of them; where engines share its GPU they stay mapped from update to update."""
    apart = rank_memories(config(sync__bucket_mb=128), MODELS, H100)[ACTOR]
    shared = rank_memories(config("ppo_7b_1node", sync__bucket_mb=128), MODELS, H100)[ACTOR]
    assert apart.phases["sync"]["sync buffers"] == shared.resting["sync buffers"] == 3 * 128 << 20
    assert "sync buffers" not in rank_memories(config(), MODELS, H100)[CRITIC].resting | apart.resting


def test_what_a_reading_of_the_code_had_estimated() -> None:
    """7B on 8 and 4 ranks of 80 GB, micro-batches of 32,768 tokens: about 56 GB for the actor and 60 for the critic."""
    found = account(
        config(train__colocate_actor_ref=False, critic__num_gpus_per_node=2, ref__zero_stage=0), MODELS, H100
    )
    assert needed(found, ACTOR) == pytest.approx(56, rel=0.1)
    assert needed(found, CRITIC) == pytest.approx(60, rel=0.1)
    thirty_two = shape_of(SHAPES["32B"])
    alone = account(config("ppo_32b", vllm__tensor_parallel_size=1), dict.fromkeys(ROLES, thirty_two), H100)
    assert weights(thirty_two, 1, 2) / GIB == pytest.approx(61, abs=0.5)
    assert alone.engine.blocks * 16 == pytest.approx(22_000, rel=0.1)  # tokens
    assert alone.engine.sequences < alone.wanted == 60


def test_terms_follow_their_keys() -> None:
    base = rank_memories(config(), MODELS, H100)

    def terms(role: str, phase: str, **changes: object) -> dict[str, int]:
        return rank_memories(config(**changes), MODELS, H100)[role].at(phase)

    update = base[ACTOR].at("update")
    half = terms(ACTOR, "update", train__max_tokens_per_gpu=16384)
    assert half["activations"] == pytest.approx(update["activations"] / 2, rel=0.01)
    assert terms(ACTOR, "update", train__logprob_chunk_tokens=1024)["logits"] == update["logits"] // 2
    plain = terms(ACTOR, "update", actor__gradient_checkpointing_enable=False)
    assert plain["activations"] > 5 * update["activations"]
    cut = terms(ACTOR, "update", ds__zero_stage=3)
    assert cut["parameters"] < update["parameters"] / 7
    assert cut["gathered layers"] == 2_000_000_000
    copied = terms(ACTOR, "update", ds__zero_stage=3, ds__hpz_size=4)
    assert copied["parameters"] - cut["parameters"] == pytest.approx(2 * SEVEN.parameters / 4, rel=1e-6)
    assert terms(REFERENCE, "forward", ref__offload=True)["parameters"] < 0.01 * GIB
    assert terms(REFERENCE, "", ref__zero_stage=0)["parameters"] == 2 * SEVEN.parameters
    longer = terms(ACTOR, "update", data__max_len=100_000)
    assert longer["activations"] == pytest.approx(update["activations"] * 100_000 / 32768, rel=0.01)
    assert terms(ACTOR, "update", data__max_len=400_000, ds__ulysses_size=4)["activations"] == longer["activations"]
    assert "logits" not in base[CRITIC].at("update")
    eager = terms(ACTOR, "update", ds__attn_implementation="eager")
    assert eager["activations"] > update["activations"] + 32768 * 28 * 4096 * 4


def test_a_reward_model_has_a_row_and_no_reference_has_none() -> None:
    made = config(algo__kl__init_coef=0.0, reward__model_name_or_path="somewhere", train__colocate_actor_ref=False)
    found = account(made, MODELS, H100)
    assert [row.name for row in found.rows] == [ACTOR, CRITIC, REWARD, ROLLOUT]
    assert all(row.there == H100 for row in found.rows)


def test_actor_and_reference_compute_at_once() -> None:
    held = rank_memories(config(), MODELS, H100)
    (row,) = [row for row in account(config(), MODELS, H100).rows if row.together]
    both = {phase: held[ACTOR].at(phase) for phase in ("update", "forward", "step")}
    rest = {"update": "", "forward": "forward", "step": ""}
    expected = max(sum(terms.values()) + sum(held[REFERENCE].at(rest[phase]).values()) for phase, terms in both.items())
    assert row.needed == expected
    assert {row.name for row in account(config(), MODELS, H100).rows if not row.there} == {ACTOR, REFERENCE}


def test_all_on_one_gpu_is_the_sum_of_what_stays() -> None:
    made = config("ppo_7b_1node")
    held, found = rank_memories(made, MODELS, H100), account(made, MODELS, H100)
    trainers = (ACTOR, CRITIC, REFERENCE)
    awake = sum(held[ROLLOUT].at("generation").values()) + sum(sum(held[r].at("parked").values()) for r in trainers)
    assert needed(found, "together: generation") == pytest.approx(awake / GIB)
    working = sum(held[ACTOR].at("update").values()) + sum(
        sum(held[role].at("").values()) for role in (CRITIC, REFERENCE, ROLLOUT)
    )
    assert needed(found, "together: actor update") == pytest.approx(working / GIB)
    awake_states = account(config("ppo_7b_1node", ds__enable_sleep=False), MODELS, H100)
    parked = held[ACTOR].parked["optimizer states"] + held[CRITIC].parked["optimizer states"]
    both = needed(awake_states, "together: generation"), needed(found, "together: generation")
    assert both[0] - both[1] == pytest.approx(parked / GIB)
    assert not awake_states.fits()
    assert max(row.needed for row in found.rows) < H100 - 8 * GIB, "what no estimate knows has too little room"
    # Six tensors of 3.5 GiB at most, each in pinned memory of 4 GiB.
    assert found.pinned == 24 * GIB > 1.1 * parked
    assert awake_states.pinned == 0
    assert (
        "enable_sleep = true # optimizer states are in host memory while the engines work: 24 GiB for each GPU\n"
        in (SBATCH / "ppo_7b_1node.toml").read_text()
    )


@pytest.mark.parametrize(
    ("changes", "gib", "role", "expected"),
    [
        (
            {"actor__gradient_checkpointing_enable": False},
            79.1,
            ACTOR,
            ["set train.gradient_checkpointing = full", "set ds.zero_stage = 3"],
        ),
        (
            {"train__logprob_chunk_tokens": 32768},
            79.1,
            ACTOR,
            ["lower train.logprob_chunk_tokens (now 32768)", "set ds.zero_stage = 3"],
        ),
        (
            {"train__max_tokens_per_gpu": 200_000},
            79.1,
            ACTOR,
            ["lower train.max_tokens_per_gpu (now 200000)", "set ds.zero_stage = 3"],
        ),
        (
            {"critic__num_nodes": 1, "critic__num_gpus_per_node": 1},
            79.1,
            CRITIC,
            ["raise critic.num_nodes (now 1)", "set ds.zero_stage = 3"],
        ),
        (
            {"vllm__gpu_memory_utilization": 0.99},
            79.1,
            ROLLOUT,
            ["lower vllm.gpu_memory_utilization to 0.95 (now 0.99)", "raise vllm.tensor_parallel_size (now 1)"],
        ),
        (
            {"vllm__gpu_memory_utilization": 0.69},
            24.0,
            ROLLOUT,
            ["raise vllm.gpu_memory_utilization (now 0.69)", "raise vllm.tensor_parallel_size (now 1)"],
        ),
        (
            {"ref__zero_stage": 0, "train__colocate_actor_ref": False},
            14.0,
            REFERENCE,
            ["set ref.zero_stage = 3", "lower train.forward_max_tokens_per_gpu (now 65536)"],
        ),
    ],
)
def test_two_keys_that_help_are_named(changes: dict[str, object], gib: float, role: str, expected: list[str]) -> None:
    made = config(**changes)
    found = account(made, MODELS, int(gib * GIB))
    assert not found.fits(role)
    worst = max((row for row in found.rows if row.role == role), key=lambda row: (not row.fits, row.needed))
    assert help_for(made, worst) == expected


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]} {way[1]} {way[2]}")
def test_what_is_said_to_help_makes_the_term_smaller(way: tuple[str, str, str, object]) -> None:
    kinds, term, template, how = way
    base: dict[str, object] = {"actor__gradient_checkpointing_enable": False, "ref__zero_stage": 0}
    base |= {"ds__zero_stage": 0 if how == 2 else 2, "data__max_len": 4096, "train__forward_max_tokens_per_gpu": 65536}
    if template.startswith("rollout."):
        base |= {
            "rollout__engine": "hf",
            "ds__zero_stage": 3,
            "rollout__hf_gather": "batch",
            "rollout__hf_max_num_seqs": 8,
        }
    if template == "data.max_len":
        base |= {"train__max_tokens_per_gpu": 1, "train__forward_max_tokens_per_gpu": 1}
    for role in (role for role in (ROLES[ACTOR], ROLES[REFERENCE], ROLES[ROLLOUT]) if role.kind in kinds.split()):
        key = template.format(group=role.group)
        assert (template, how) in ways_for(role, term)
        now = get(config(**base), key)
        value = how if how not in (LOWER, RAISE) else type(now)(now * (2 if how == RAISE else 0.5))
        if key == "ref.offload":
            base["ref__zero_stage"] = 3
        before, after = (
            rank_memories(config(**keys), MODELS, H100)[role.name]
            for keys in (base, base | {key.replace(".", "__"): value})
        )
        sizes = [max(held.at(phase).get(term, 0) for phase in held.phases) for held in (before, after)]
        assert sizes[1] < sizes[0]


def test_weights_of_a_tp_rank() -> None:
    assert weights(SEVEN, 1, 2) == 2 * SEVEN.parameters  # its vocabulary is a multiple of 64
    small = 2 * SEVEN.of_kind("norm", "bias")
    assert weights(SEVEN, 4, 2) == pytest.approx((2 * SEVEN.parameters - small) / 4 + small)
    keys = 2 * 2 * SEVEN.hidden * SEVEN.kv_heads * SEVEN.head_dim * SEVEN.layers
    assert weights(SEVEN, 8, 2) == pytest.approx((2 * SEVEN.parameters - small + keys) / 8 + small)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma", "mistral", "gemma3_text"])
def test_the_kv_cache_of_other_models_is_as_planned(engine_process: EngineProcess, tmp_path: Path, arch: str) -> None:
    """A real engine says so; Mistral's window is longer than its texts, Gemma 3's is in five layers of six."""
    engine_process.run(child.start, make_tiny(tmp_path / arch, arch, heads=2, kv_heads=1, layers=7), "fp32", 5)
    made, shape = engine_process.run(child.kv_cache), read_shape("actor.model_name_or_path", tmp_path / arch)
    assert made["blocks"] == made["bytes"] // block_bytes(shape, 1, 4, made["block"])
    per_sequence = blocks_of_sequence(shape, made["length"], 4096, made["block"])
    assert made["sequences"] == pytest.approx(made["blocks"] / per_sequence)


# --- activations ------------------------------------------------------------------------------------------------------


DTYPES = {2: torch.bfloat16, 4: torch.float32}
BATCH, LENGTH = 2, 48
ASKED = ("qwen2", "llama", "mistral", "gemma")


def hooked(model: Any, run: Any) -> int:
    """Bytes of the memory that autograd keeps of `run`, each once, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def counted_and_computed(
    variant: str, dtype: int, checkpointing: str, attention: str, autocast: bool = False, **sizes: Any
) -> tuple[int, int]:
    wide = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "head_dim": 48} | sizes
    if variant == "olmoe":
        wide["head_dim"] = 32  # its norm of queries is as wide as the hidden state
    config = make_config(variant, **wide, attn_implementation=attention)
    weights = torch.float32 if autocast else DTYPES[dtype]
    model = AutoModelForCausalLM.from_config(config, dtype=weights, attn_implementation=attention).train()
    if checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(2, 90, (BATCH, LENGTH))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        counted = hooked(model, lambda: model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    how = Pass(BATCH * LENGTH, LENGTH, dtype, checkpointing, attention, autocast)
    shape = shape_of(config.to_dict())
    copies = autocast_weights(shape, how) - (2 * shape.of_kind("head") if autocast else 0)
    return counted, saved(shape, how) + copies


@pytest.mark.parametrize("checkpointing", ["off", "full"])
@pytest.mark.parametrize("dtype", [2, 4])
@pytest.mark.parametrize("variant", ASKED)
def test_saved_bytes_are_those_that_hooks_count(variant: str, dtype: int, checkpointing: str) -> None:
    counted, computed = counted_and_computed(variant, dtype, checkpointing, "sdpa")
    assert computed == pytest.approx(counted, rel=0.15)


@pytest.mark.full
@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", ["off", "full"])
@pytest.mark.parametrize("dtype", [2, 4])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "biases" not in name])
def test_saved_bytes_of_all_families(variant: str, dtype: int, checkpointing: str, attention: str, layers: int) -> None:
    counted, computed = counted_and_computed(variant, dtype, checkpointing, attention, num_hidden_layers=layers)
    assert computed == pytest.approx(counted, rel=0.15)


@pytest.mark.parametrize("variant", ["qwen2", "gemma"])
def test_saved_bytes_under_autocast(variant: str) -> None:
    """ZeRO stage 0 in bf16 saves these, with autocast's copies of the matrices; the head was not run."""
    counted, computed = counted_and_computed(variant, 2, "off", "sdpa", autocast=True)
    assert computed == pytest.approx(counted, rel=0.15)


def test_checkpointing_keeps_layer_inputs_and_one_layer() -> None:
    shape = shape_of(make_config("qwen2").to_dict())
    plain, light = Pass(100, 10, 2), Pass(100, 10, 2, checkpointing="full")
    assert recomputed(shape, plain) == 0
    one = (saved(shape, plain) - saved(shape, Pass(0, 10, 2))) / shape.layers
    assert 0.8 * one < recomputed(shape, light) <= one
    assert saved(shape, light) < 0.3 * saved(shape, plain)
    streams = shape.layers * shape.hidden * 4 + shape.hidden * (4 + 4) + 12  # under autocast all are fp32
    angles = 2 * shape.head_dim * 10 * 4
    assert saved(shape, Pass(100, 10, 2, "full", "sdpa", True)) == 100 * streams + angles


# --- generation memory ------------------------------------------------------------------------------------------------


BY_SIZE = {size: dict.fromkeys(ROLES, shape_of(SHAPES[size])) for size in SHAPES}


def hf_config(**changes: object) -> Config:
    return config(**{"rollout__engine": "hf", "ds__zero_stage": 3, "rollout__hf_max_num_seqs": 8, **changes})


def test_the_terms_of_a_batch() -> None:
    made, shape = hf_config(data__max_len=2048, rollout__max_new_tokens=1024), shape_of(SHAPES["7B"])
    found = hf_terms(made, shape, whole=True)
    assert found["gathered parameters"] == 2 * shape.parameters
    assert found["KV cache"] == 8 * 2048 * (28 + 1) * 2 * 4 * 128 * 2  # rows, tokens, layers, keys and values, heads
    assert found["logits"] == 6 * 4 * 8 * 152064
    assert hf_terms(hf_config(rollout__hf_max_num_seqs=0), shape, whole=True)["logits"] == 6 * 4 * 64 * 152064
    assert hf_terms(made, shape, whole=False)["gathered parameters"] <= found["gathered parameters"]
    assert "gathered parameters" not in hf_terms(hf_config(ds__zero_stage=2), shape, whole=True)


@pytest.mark.parametrize(
    ("size", "changes", "gpu", "whole"),
    [
        ("7B", {}, H100, True),
        ("32B", {}, H100, False),
        ("32B", {"rollout__hf_gather": "batch"}, H100, True),
        ("7B", {"rollout__hf_gather": "layer"}, H100, False),
        ("32B", {"ds__zero_stage": 2}, H100, True),
        ("32B", {}, 0, True),  # a CPU, whose memory is not estimated
    ],
)
def test_parameters_are_gathered_once_where_they_fit(
    size: str, changes: dict[str, object], gpu: int, whole: bool
) -> None:
    made = hf_config(**changes)
    assert gathers_once(made, gpu, BY_SIZE[size]) == whole
    if gpu and made.ds.zero_stage == 3:
        held = rank_memories(made, BY_SIZE[size], gpu)[ACTOR].phases["generation"]["gathered parameters"]
        assert (held == 2 * BY_SIZE[size][ACTOR].parameters) == whole


def test_ranks_decide_by_the_files_of_the_model_as_plan_does(tmp_path: Path) -> None:
    known, unknown = make_shape(tmp_path / "7b", "7B"), make_shape(tmp_path / "new", "7B", model_type="unheard_of")
    assert gathers_once(hf_config(actor__model_name_or_path=str(known)), H100)
    assert not gathers_once(hf_config(actor__model_name_or_path=str(unknown)), H100)  # layer by layer needs least


def test_there_is_no_engine_and_no_transfer_in_the_account() -> None:
    found = account(hf_config(), BY_SIZE["7B"], H100)
    assert found.engine is None
    assert {row.role for row in found.rows} == {"actor", "critic", "reference"}
    assert "sync" not in rank_memories(hf_config(), BY_SIZE["7B"], H100)[ACTOR].phases
    shared = account(hf_config(train__colocate_all=True, train__colocate_actor_ref=False), BY_SIZE["7B"], H100)
    assert not any("generation" in row.name and row.role == "rollout" for row in shared.rows)


def test_too_many_responses_at_a_time_are_refused_with_the_key_that_helps() -> None:
    large = hf_config(rollout__hf_max_num_seqs=4096)
    found = account(large, BY_SIZE["7B"], H100)
    (row,) = [row for row in found.rows if row.role == ACTOR and not row.fits]
    assert help_for(large, row)[0] == "lower rollout.hf_max_num_seqs (now 4096)"
