"""rollout.engine = hf: which roles it leaves, and which keys it excludes or has no use for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_rlhf.config.keys import put
from slurm_rlhf.config.model_directory import check_architecture
from slurm_rlhf.config.roles import ROLLOUT, running_roles
from slurm_rlhf.config.rules import EngineRules, rule_problems, unused_note
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError


def config(**keys: Any) -> Config:
    made = Config()
    for name, value in {"rollout.engine": "hf", **keys}.items():
        put(made, name, value)
    return made


def test_the_actor_samples_alone() -> None:
    assert ROLLOUT not in [role.name for role in running_roles(config())]
    assert ROLLOUT in [role.name for role in running_roles(Config())]
    assert list(rule_problems(config())) == []
    assert list(rule_problems(config(**{"train.colocate_all": True}))) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"vllm.sync_mode": "inflight"}, ("vllm.sync_mode = inflight", "rollout.engine = vllm")),
        ({"vllm.tensor_parallel_size": 2}, ("vllm.tensor_parallel_size = 2", "ds.zero_stage = 3")),
        ({"vllm.dtype": "fp32"}, ("vllm.dtype = fp32", "ds.param_dtype = bf16")),
        ({"ds.enable_sleep": True, "train.colocate_all": True}, ("ds.enable_sleep", "leave the key out")),
        ({"eval.overlap": True, "eval.dataset": "e.jsonl"}, ("eval.overlap", "leave the key out")),
        ({"rollout.hf_gather": "layer"}, ("rollout.hf_gather = layer", "ds.zero_stage = 3")),
        ({"rollout.engine": "vllm", "rollout.hf_max_num_seqs": 8}, ("rollout.hf_max_num_seqs = 8", "= vllm")),
    ],
)
def test_what_it_excludes_is_one_sentence_that_names_the_key(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    (problem,) = EngineRules(config(**keys)).problems()
    assert all(word in problem for word in words)
    assert problem in list(rule_problems(config(**keys)))


def test_keys_without_effect_are_told() -> None:
    assert unused_note(config()) == ""
    assert unused_note(config(**{"rollout.engine": "vllm", "vllm.max_num_seqs": 16})) == ""
    told = unused_note(config(**{"vllm.max_num_seqs": 16, "sync.bucket_mb": 8}))
    assert "vllm.max_num_seqs, sync.bucket_mb have no effect" in told


def test_models_that_are_refused_because_of_engines_are_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ApertusForCausalLM"], "model_type": "apertus"}')
    check_architecture("actor", str(tmp_path), engines=False)
    with pytest.raises(ModelError, match="ApertusForCausalLM"):
        check_architecture("actor", str(tmp_path))


def test_the_quickstart_may_be_run_with_it() -> None:
    from slurm_rlhf.config.load import load_config

    root = Path(__file__).parents[2]
    loaded = load_config([root / "sbatch" / "quickstart.toml"], ["--rollout.engine=hf"])
    assert list(rule_problems(loaded)) == []
