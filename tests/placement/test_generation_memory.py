"""The memory of an actor that samples itself: what is gathered, and what is advised where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_configs import SHAPES, make_shape

from slurm_rlhf.config.keys import put
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ACTOR, ROLES
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.memory import account, gathers_once, help_for, rank_memories
from slurm_rlhf.placement.model_shape import shape_of
from slurm_rlhf.placement.rank_memory import GIB, hf_terms

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
H100 = int(79.1 * GIB)
MODELS = {size: dict.fromkeys(ROLES, shape_of(SHAPES[size])) for size in SHAPES}


def config(**changes: object) -> Config:
    made = load_config(SBATCH / "ppo_7b.toml", [])
    for key, value in {"rollout__engine": "hf", "ds__zero_stage": 3, "rollout__hf_max_num_seqs": 8, **changes}.items():
        put(made, key.replace("__", "."), value)
    return made


def test_the_terms_of_a_batch() -> None:
    made, shape = config(data__max_len=2048, rollout__max_new_tokens=1024), shape_of(SHAPES["7B"])
    found = hf_terms(made, shape, whole=True)
    assert found["gathered parameters"] == 2 * shape.parameters
    assert found["KV cache"] == 8 * 2048 * (28 + 1) * 2 * 4 * 128 * 2  # rows, tokens, layers, keys and values, heads
    assert found["logits"] == 6 * 4 * 8 * 152064
    assert hf_terms(made, shape, whole=False)["gathered parameters"] <= found["gathered parameters"]
    assert "gathered parameters" not in hf_terms(config(ds__zero_stage=2), shape, whole=True)


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
    made = config(**changes)
    assert gathers_once(made, gpu, MODELS[size]) == whole
    if gpu and made.ds.zero_stage == 3:
        held = rank_memories(made, MODELS[size], gpu)[ACTOR].phases["generation"]["gathered parameters"]
        assert (held == 2 * MODELS[size][ACTOR].parameters) == whole


def test_ranks_decide_by_the_files_of_the_model_as_plan_does(tmp_path: Path) -> None:
    known, unknown = make_shape(tmp_path / "7b", "7B"), make_shape(tmp_path / "new", "7B", model_type="unheard_of")
    assert gathers_once(config(actor__model_name_or_path=str(known)), H100)
    assert not gathers_once(config(actor__model_name_or_path=str(unknown)), H100)  # layer by layer needs least


def test_there_is_no_engine_and_no_transfer_in_the_account() -> None:
    found = account(config(), MODELS["7B"], H100)
    assert found.engine is None
    assert {row.role for row in found.rows} == {"actor", "critic", "reference"}
    assert "sync" not in rank_memories(config(), MODELS["7B"], H100)[ACTOR].phases
    shared = account(config(train__colocate_all=True, train__colocate_actor_ref=False), MODELS["7B"], H100)
    assert not any("generation" in row.name and row.role == "rollout" for row in shared.rows)


def test_too_many_responses_at_a_time_are_refused_with_the_key_that_helps() -> None:
    large = config(rollout__hf_max_num_seqs=4096)
    found = account(large, MODELS["7B"], H100)
    (row,) = [row for row in found.rows if row.role == ACTOR and not row.fits]
    assert help_for(large, row)[0] == "lower rollout.hf_max_num_seqs (now 4096)"
