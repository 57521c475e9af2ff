"""TP ranks that do not do the same: every such engine is stopped in seconds, by name, and hands out nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rollout_fleet import RolloutFleet, config
from rollout_zygote import Zygote
from tiny_models import make_tiny

from slurm_rlhf.errors import RunError
from slurm_rlhf.records import Sampling

pytestmark = pytest.mark.timeout(500)

KINDS = ("reversed", "unseeded", "uneven")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutFleet]:
    """One engine of two ranks for each kind of misbehaviour."""
    root = tmp_path_factory.mktemp("misfits")
    model = make_tiny(root / "model", hidden=128, heads=4, kv_heads=2)
    misfits = str(Path(__file__).with_name("rollout_misfits.py"))
    zygote = Zygote()
    made = RolloutFleet(zygote, config(model, root / "run", engines=len(KINDS), tp=2), misfits)
    try:
        made.launch(MISFIT=",".join(KINDS))
        made.start(400)
        yield made
    finally:
        made.close()
        zygote.end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_that_goes_its_own_way_stops_its_engine(fleet: RolloutFleet, kind: str) -> None:
    engine = KINDS.index(kind)
    rng = np.random.default_rng(0)
    prompts = [[i, i, rng.integers(2, 60, 5 + 3 * i).astype(np.int32)] for i in range(6)]
    order = {"sampling": Sampling(max_new_tokens=24).to_wire(), "run_seed": 1, "version": 0}
    started = time.monotonic()
    answer = fleet.engines.call(engine, "generate", prompts=prompts, **order)
    fleet.ended([2 * engine], 20)
    assert time.monotonic() - started < 15
    [reason] = [data["reason"] for rank, _, data in fleet.events if rank == 2 * engine]
    assert f"engine {engine} (rollout ranks {2 * engine} to {2 * engine + 1} on" in reason
    assert f"rollout ranks {2 * engine} and {2 * engine + 1} (TP ranks 0 and 1) did not do the same" in reason
    # The main thread says so, too, unless it hangs in the collective that the other rank does not join.
    assert not answer.done() or isinstance(answer.exception(), RunError)
    fleet.ended([2 * engine + 1], 5)
