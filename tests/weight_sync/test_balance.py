"""Who sends how much over links of different rates: the rules, and the rates that they are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.weight_sync import group
from slurm_rlhf.weight_sync.balance import GIGABIT, parents
from slurm_rlhf.weight_sync.group import SyncGroup, known_rates
from slurm_rlhf.weight_sync.member import Membership
from slurm_rlhf.weight_sync.pace import Adviser, Arrivals, gain
from slurm_rlhf.weight_sync.routes import cost_of
from slurm_rlhf.weight_sync.transfer_plan import Layout, SyncPlan, make_plan, relays

PARAMETERS = [[f"p{i}", [512, 101], "bf16"] for i in range(16)]


def planned(actors: str, engines: str, zero: int, rates: tuple[float, ...] = ()) -> SyncPlan:
    return make_plan(PARAMETERS, 1 << 19, Layout(tuple(actors), tuple(engines), zero, rates=rates), 1 << 12)


def slowest(plan: SyncPlan, rates: dict[str, float]) -> float:
    """The seconds of the busiest link, by the account of all bytes; nodes without a rate have that of the fastest."""
    cost, fastest = cost_of(plan), max(rates.values())
    nodes = {*cost.out, *cost.into}
    return max(max(cost.out[node], cost.into[node]) / rates.get(node, fastest) for node in nodes)


@pytest.mark.parametrize("engines", ["pq", "pqrs", "ppqq"])
def test_one_of_two_actor_nodes_at_a_tenth(engines: str) -> None:
    """Where each rank has everything, the engines' own links are the limit; of a shard each byte leaves once."""
    rates = {"x": 1e6, "y": 1e5}
    whole, cut = (planned("xy", engines, zero, tuple(rates.values())) for zero in (0, 3))
    assert slowest(whole, rates) <= 1.05 * whole.payload / 1e6
    assert cost_of(cut).out["y"] == pytest.approx(cut.payload / 2, rel=0.01)
    assert slowest(cut, rates) <= 1.05 * cut.payload / 2 / 1e5
    for zero in (0, 3):  # as it is where rates are not known
        assert slowest(planned("xy", engines, zero), rates) >= 1.9 * slowest((whole, whole, whole, cut)[zero], rates)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from("xyz"), min_size=1, max_size=6).map(sorted),
    st.lists(st.sampled_from("xypqr"), min_size=1, max_size=6).map(sorted),
    st.sampled_from([0, 3]),
    st.lists(st.floats(1e5, 1e7), min_size=6, max_size=6),
)
def test_no_rates_make_a_plan_slower_than_equal_shares(actors, engines, zero, rates) -> None:
    """Nor do they make anybody send a byte twice to a node, which the tests of the plan show for any duties."""
    known = tuple(rates[: len(actors)])
    equal = planned("".join(actors), "".join(engines), zero)
    balanced = equal.at_rates(known)
    assert balanced.payload == equal.payload
    assert sum(part.nbytes for part in balanced.parts(0, 0)) == balanced.nbytes(0, 0)
    assert gain(balanced, known) == 1
    assert gain(equal, known) >= 1 / 1.15
    assert equal.at_rates(()) == equal


def test_rails_of_300_and_100_get_three_quarters_and_a_quarter() -> None:
    layout = Layout(("x", "x"), ("p", "p"), 0, ("ib0", "ib1") * 2, (300e6, 100e6))
    plan = make_plan(PARAMETERS, 1 << 19, layout)
    assert cost_of(plan).sent[0] == pytest.approx(0.75 * plan.payload, rel=0.01)


def test_nearly_equal_rates_change_nothing_but_the_shares() -> None:
    equal = planned("xy", "pq", 0)
    noisy = planned("xy", "pq", 0, (1e6, 0.93e6))
    assert not relays(equal.layout)
    assert not relays(noisy.layout)
    assert gain(equal, (1e6, 0.93e6)) < 1.1


def test_rates_that_are_not_all_known_count_for_nothing() -> None:
    equal, partly = planned("xy", "pq", 0), planned("xy", "pq", 0, (1e6, 0.0))
    assert partly.streams == equal.streams
    assert gain(equal, (1e6, 0.0)) == 1


@given(st.integers(1, 200), st.integers(1, 9))
def test_every_node_gets_a_chunk_from_one_before_it(nodes: int, copies: int) -> None:
    copies = min(copies, nodes)
    found = parents(nodes, copies)
    assert len(found) == nodes
    assert found.count(-1) == copies
    assert all(-1 <= giver < at for at, giver in enumerate(found))
    assert max(found.count(giver) for giver in range(nodes)) <= 18  # of 200 nodes, one head would have 199
    stations = [0] * nodes
    for at, giver in enumerate(found):
        stations[at] = 0 if giver < 0 else stations[giver] + 1
    assert max(stations) <= 3 * 6


def test_rank_0_advises_after_two_updates_that_agree() -> None:
    plan, slow, equal = planned("xy", "pq", 0), [(5e5, 5e4), (5e5, 5e4), ()], [(5e5, 5e5), (5e5, 4e5)]
    adviser = Adviser()
    assert adviser.advise(plan, []) == ()
    assert adviser.advise(plan, slow) == ()
    assert adviser.advise(plan, equal) == ()
    assert adviser.advise(plan, slow) == ()
    found = adviser.advise(plan, slow)
    assert found == pytest.approx((1e6, 1e5))
    follows = plan.at_rates(found)
    assert adviser.advise(follows, slow) == found
    assert [adviser.advise(follows, equal) for _ in range(3)] == [found] * 3  # mended: engines' links are the limit
    other = [(5e4, 5e5)] * 2
    assert adviser.advise(follows, other) == found
    assert adviser.advise(follows, other) == pytest.approx((1e5, 1e6))


def test_time_in_which_nothing_was_asked_for_is_no_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("slurm_rlhf.weight_sync.pace.time.monotonic", lambda: clock[0])
    arrivals = Arrivals(3)
    for asked, came, actor in [(0, 1, 0), (0, 2, 0), (10, 11, 0), (0, 4, 1), (0, 8, 1)]:
        clock[0] = float(came)
        arrivals.came(actor, 1 << 20, float(asked))
    assert arrivals.take() == (1 << 20, (1 << 20) / 4, 0.0)
    assert arrivals.take() == (0.0, 0.0, 0.0)


def test_a_layout_with_rates_is_another_plan() -> None:
    plan = planned("xy", "pq", 0)
    assert plan.at_rates((1.0, 2.0)).fingerprint() != plan.fingerprint()
    assert plan.at_rates((1.0, 2.0)).layout == replace(plan.layout, rates=(1.0, 2.0))


def test_rates_of_the_configuration_are_those_of_the_actors_ranks() -> None:
    nodes = ["a1.site", "a1.site", "a2.site", "r1", "r2"]
    assert known_rates("", nodes, 3) == ((), [])
    assert known_rates("100", nodes, 3) == ((), [])
    assert known_rates("100,a2:10", nodes, 3) == ((50 * GIGABIT, 50 * GIGABIT, 10 * GIGABIT), [])
    assert known_rates("100,a[1-2]:10,gone7:1", nodes, 3) == ((5 * GIGABIT, 5 * GIGABIT, 10 * GIGABIT), ["gone7"])
    assert known_rates("100,r1:10", nodes, 3) == ((), [])  # who takes from whom does not follow an engine's link
    with pytest.raises(ConfigError, match=r"sync.network_gbits: cannot read"):
        known_rates("100,a[2-1:10", nodes, 3)


def test_the_first_plan_follows_the_rates_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two actor nodes at a tenth: it owns a tenth of what the other does, before anything was measured."""

    def meet(joining: Membership) -> SyncGroup:
        made = SyncGroup(joining)
        made.members = tuple(replace(made.me, rank=rank, node=node) for rank, node in enumerate(["a1", "a2", "r1"]))
        made.rates = joining.rates
        return made

    monkeypatch.setattr(group, "join", meet)
    config = Config()
    config.sync.network_gbits = "8,a2:0.8,gone:1"
    where = {"name": "g", "rank": 0, "world": 3, "actors": 2, "host": "127.0.0.1", "port": 1}
    joined, plan = group.join_run(config, "actor 0", [["p", [4000, 256], "bf16"]], where)
    assert joined.rates == plan.layout.rates == (8 * GIGABIT, 0.8 * GIGABIT)
    assert "sync.network_gbits names gone; no rank" in caplog.text
    fast, slow = (sum(piece.span.nbytes for piece in part.pieces) for part in plan.parts(0, 0))
    assert slow == pytest.approx(fast / 10, rel=0.02)
    _, measured = group.join_run(config, "actor 0", plan.described, where | {"rates": (1e9, 2e9)})
    assert measured.layout.rates == (1e9, 2e9)
