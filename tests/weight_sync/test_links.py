"""Links of different rates, in network namespaces: what an update costs once the members know them."""

from __future__ import annotations

import json

import pytest
from shaped_links import available, shaped

from slurm_rlhf.bench.sync import World, measure, parameters_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="network namespaces and tc need root"),
]


def measured(nbytes: int, zero: int, fast: str, slow: str, **options: object) -> tuple[dict, int]:
    """The bench with two actor nodes, one of them slow, and two rollout nodes; and the bytes that the slow one sent."""
    nodes = ["actor0", "actor1", "rollout0", "rollout1"]
    with shaped(nodes, fast) as links:
        links.limit("actor1", slow)
        world = World(
            parameters_of(nbytes),
            actors=nodes[:2],
            engines=nodes[2:],
            zero=zero,
            naive=False,
            host=links.address("actor0"),
            prefix=links.inside,
            **options,
        )
        found = measure(world)
        print(json.dumps(found))
        return found, links.sent("actor1", "eth0")


@pytest.mark.timeout(180)
def test_a_slow_actor_node_gets_less_to_send() -> None:
    """Four updates: two to learn the rates, two that follow them."""
    found, sent = measured(8_000_000, 0, "400mbit", "40mbit", bucket_bytes=4 << 20, repeats=3)
    # A copy of the model each time, were nothing known; half of it, if each byte left once.
    assert sent < 2.6 * found["bytes"]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("zero", [0, 3])
def test_a_node_at_a_tenth_costs_what_the_network_costs(zero: int) -> None:
    """100 MB at 400 Mbit/s, one of two actor nodes at 40: by the engines' links, or by the slow shard sent once."""
    found, sent = measured(100_000_000, zero, "400mbit", "40mbit", bucket_bytes=16 << 20, repeats=5)
    optimum = found["raw_seconds"] if zero == 0 else 5 * found["raw_seconds"]
    assert found["seconds"] <= 1.3 * optimum
    # Two updates in which nothing is known yet, four that follow the rates.
    assert sent <= (2 + 4 * (0.15 if zero == 0 else 0.55)) * found["bytes"]
