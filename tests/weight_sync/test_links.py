"""Links of different rates, in network namespaces: what an update costs once the members know them."""

from __future__ import annotations

import json
import statistics

import long_links
import pytest
import raw_relay
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


def test_a_slow_actor_node_gets_less_to_send() -> None:
    """Four updates: two to learn the rates, two that follow them."""
    found, sent = measured(8_000_000, 0, "400mbit", "40mbit", bucket_bytes=4 << 20, repeats=3)
    # A copy of the model each time, were nothing known; half of it, if each byte left once.
    assert sent < 2.6 * found["bytes"]


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 3])
def test_a_node_at_a_tenth_costs_what_the_network_costs(zero: int) -> None:
    """100 MB at 400 Mbit/s, one of two actor nodes at 40: by the engines' links, or by the slow shard sent once."""
    found, sent = measured(100_000_000, zero, "400mbit", "40mbit", bucket_bytes=16 << 20, repeats=5)
    optimum = found["raw_seconds"] if zero == 0 else 5 * found["raw_seconds"]
    assert found["seconds"] <= 1.3 * optimum
    # Two updates in which nothing is known yet, the first and that of the memory figure; five that follow the rates.
    assert sent <= (2 + 5 * (0.15 if zero == 0 else 0.55)) * found["bytes"]


def long_world(links: long_links.LongLinks) -> World:
    """100 MB of ZeRO-3 shards from and to all nodes, two ranks on each."""
    actors = [node for node in links.nodes if node.startswith("actor")]
    return World(
        parameters_of(100_000_000),
        actors=[node for node in actors for _ in range(2)],
        engines=[node for node in links.nodes if node not in actors for _ in range(2)],
        zero=3,
        naive=False,
        bucket_bytes=16 << 20,
        host=links.address("actor0"),
        prefix=links.inside,
    )


@pytest.mark.full
@pytest.mark.skipif(not long_links.available(), reason="packets are delayed by way of /dev/net/tun")
def test_links_of_20_ms_are_as_full_as_one_stream_makes_them() -> None:
    """Eight ranks on four nodes, 100 MB of ZeRO-3 shards at 400 Mbit/s; a round trip takes 20 ms."""
    nodes = ["actor0", "actor1", "rollout0", "rollout1"]
    with long_links.long(nodes, 400, 0.01) as links:
        found = measure(long_world(links))
    print(json.dumps(found))
    assert found["raw_seconds"] > found["bytes"] / 50e6  # the links are no faster than they were set
    assert found["share_of_raw"] >= 1 / 1.15


@pytest.mark.full
@pytest.mark.skipif(not long_links.available(), reason="packets are delayed by way of /dev/net/tun")
def test_relays_over_links_of_20_ms_are_as_fast_as_plain_streams_of_the_same_shape() -> None:
    """Six nodes with twelve ranks share this machine: all is six times slower, so that each has the time of its own."""
    heads = [("actor0", 0, 1), ("actor0", 2, 3), ("actor1", 1, 0), ("actor1", 3, 2)]
    chains = [(actor, f"rollout{head}", f"rollout{other}") for actor, head, other in heads]
    nodes = ["actor0", "actor1", *(f"rollout{index}" for index in range(4))]
    with long_links.long(nodes, 400, 0.01, slower=6) as links:
        found = measure(long_world(links))
        relays = raw_relay.seconds(links, chains, found["bytes"] // 2, 3)
        print(json.dumps(found | {"relay_seconds": relays} | links.counts()))
    assert statistics.median(relays) > 6 * found["bytes"] / 50e6  # the links are no faster than they were set
    assert found["seconds"] <= 1.2 * statistics.median(relays)
    assert found["share_of_raw"] >= 1 / 1.46
