"""The backward pass's recomputing, as train.gradient_checkpointing = auto chooses it."""

from __future__ import annotations

import pytest
from model_configs import SHAPES

from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.placement.memory import account, least_recomputed
from slurm_rlhf.placement.model_shape import shape_of
from slurm_rlhf.placement.rank_memory import GIB

SEVEN = shape_of(SHAPES["7B"])
WORDS = ("--actor.num_gpus_per_node=8", "--critic.num_gpus_per_node=8", "--train.logprob_chunk_tokens=256")


@pytest.mark.parametrize(
    ("tokens", "stage", "gib", "way"),
    [
        (4096, 2, 79.1, "off"),
        (8192, 2, 79.1, "full"),  # selective would fit, and takes about as long
        (200_000, 2, 79.1, "full"),
        (200_000, 2, 30.0, "full"),  # nothing fits: what needs least
    ],
)
def test_auto_computes_again_where_it_must(tokens: int, stage: int, gib: float, way: str) -> None:
    made = load_config(None, [*WORDS, f"--train.max_tokens_per_gpu={tokens}", f"--ds.zero_stage={stage}"])
    models = dict.fromkeys(ROLES, SEVEN)
    settled, found = least_recomputed(made, models, int(gib * GIB))
    assert settled.checkpointing == way
    assert found == account(settled, models, int(gib * GIB))
    assert made.train.gradient_checkpointing == "auto"
    assert least_recomputed(settled, models, int(gib * GIB))[0] is settled
    for said, then in ((True, "full"), (False, "off")):
        config = changed(made, {"actor.gradient_checkpointing_enable": said})
        assert least_recomputed(config, models, int(gib * GIB))[0] is config
        assert config.checkpointing == then
