"""The KV cache of real engines: blocks and sequences as planned, for families whose layers look back differently."""

from __future__ import annotations

from pathlib import Path

import pytest
import rollout_engine as child
from rollout_engine import EngineProcess
from tiny_models import make_tiny

from slurm_rlhf.placement.engine_memory import block_bytes, blocks_of_sequence
from slurm_rlhf.placement.model_shape import read_shape


@pytest.mark.timeout(200)
@pytest.mark.full
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma", "mistral", "gemma3_text"])
def test_the_kv_cache_of_other_models_is_as_planned(engine_process: EngineProcess, tmp_path: Path, arch: str) -> None:
    """Of a real engine; Mistral's window is longer than its texts, Gemma 3's is in five layers of six."""
    engine_process.run(child.start, make_tiny(tmp_path / arch, arch, heads=2, kv_heads=1, layers=7), "fp32", 5)
    made, shape = engine_process.run(child.kv_cache), read_shape("actor.model_name_or_path", tmp_path / arch)
    assert made["blocks"] == made["bytes"] // block_bytes(shape, 1, 4, made["block"])
    per_sequence = blocks_of_sequence(shape, made["length"], 4096, made["block"])
    assert made["sequences"] == pytest.approx(made["blocks"] / per_sequence)
