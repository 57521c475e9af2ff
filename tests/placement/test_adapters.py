"""Estimates of low-rank adapters: layers of fused and of unknown names, what an update brings, engines that sleep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from model_configs import SHAPES, tensors

from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.model_directory import sent_parameters
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.memory import account, rank_memories
from slurm_rlhf.placement.model_shape import shape_of
from slurm_rlhf.placement.rank_memory import GIB, adapters, trained, weights

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
H100 = int(79.1 * GIB)
SEVEN = shape_of(SHAPES["7B"])


def config(*words: str, name: str = "grpo_lora_7b") -> Config:
    return load_config(SBATCH / f"{name}.toml", [f"--{word}" for word in words])


def targets(*names: str) -> Config:
    made = config("lora.rank=8")
    made.lora.target_modules = [*names]
    return made


def test_layers_of_fused_names_have_their_sizes() -> None:
    """Phi-3 mini: 32 heads of 96 dimensions, whose one matrix for queries, keys and values is [9216, 3072]."""
    phi = replace(SEVEN, layers=32, hidden=3072, heads=32, kv_heads=32, head_dim=96, width=8192)
    elements, sizes = trained(targets("qkv_proj", "gate_up_proj"), phi, True)
    assert sizes == {8 * 3072: 64, 8 * 9216: 32, 8 * 16384: 32}
    assert elements == sum(size * count for size, count in sizes.items())
    assert trained(targets("fc1"), phi, True) == (8 * (3072 + 8192) * 32, {8 * 3072: 32, 8 * 8192: 32})
    assert trained(targets("query_key_value"), phi, True) == trained(targets("qkv_proj"), phi, True)


@pytest.mark.parametrize("names", [["c_attn"], []])
def test_layers_of_unknown_names_are_not_counted(names: list[str]) -> None:
    made = targets(*names)
    assert trained(made, SEVEN, True) == (0, {})
    assert adapters(made, SEVEN, 1, 2) == 0
    assert account(made, dict.fromkeys(ROLES, SEVEN), H100).rows


def test_an_engine_with_adapters_that_sleeps_keeps_its_weights_in_pinned_memory() -> None:
    def pinned(*words: str) -> int:
        made = config("algo.kl.init_coef=0.01", *words, name="ppo_7b")
        return rank_memories(made, dict.fromkeys(ROLES, SEVEN), H100)[ROLLOUT].pinned

    assert pinned("train.colocate_all=true") == pinned("lora.rank=8") == 0
    assert pinned("train.colocate_all=true", "lora.rank=8") > weights(SEVEN, 2, 2)


def test_an_update_brings_adapters_of_the_matrices_in_layers(tmp_path: Path) -> None:
    stored = {"model.embed_tokens.weight": [9, 4], "model.norm.weight": [4]}
    stored |= {"model.layers.0.input_layernorm.weight": [4], "model.layers.0.self_attn.q_proj.bias": [6]}
    stored |= {"model.layers.0.self_attn.q_proj.weight": [6, 4], "model.layers.0.mlp.up_proj.weight": [8, 4]}
    (tmp_path / "model.safetensors").write_bytes(tensors(stored))
    q = [("model.layers.0.self_attn.q_proj.lora_A.weight", [3, 4])]
    q += [("model.layers.0.self_attn.q_proj.lora_B.weight", [6, 3])]
    up = [("model.layers.0.mlp.up_proj.lora_A.weight", [3, 4]), ("model.layers.0.mlp.up_proj.lora_B.weight", [8, 3])]
    for names, sent in ((["q_proj"], q), (["all-linear"], up + q), (["v_proj"], [])):
        lora = Config().lora
        lora.rank, lora.target_modules = 3, names
        assert sent_parameters(str(tmp_path), lora) == sent
    assert sent_parameters(str(tmp_path), Config().lora)[0] == ("model.embed_tokens.weight", [9, 4])
