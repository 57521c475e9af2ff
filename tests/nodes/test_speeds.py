"""Collectives with their members, and who is named when one of them is slow or does not work."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.groups import Lineup, links, orders_for, outcomes, role_groups
from slurm_rlhf.nodes.network_checks import groups as judge_groups
from slurm_rlhf.nodes.network_checks import links as judge_links
from slurm_rlhf.nodes.report import FAILED, OK, WARNING
from slurm_rlhf.placement.rank_map import RankMap, place
from slurm_rlhf.placement.replacement import chosen
from slurm_rlhf.placement.topology import RoleSize, Topology

NODES = [f"n{number}" for number in range(1, 6)]
FAST = 1e8  # bytes per second


def reports(lineup: Lineup, rate: Any) -> list[dict[str, Any]]:
    """Make the reports of all processes; `rate` of a group's nodes is in bytes per second."""
    return [
        {"process": process, "group": group.name, "latency_s": 1e-4, "size": 1 << 20}
        | dict.fromkeys(("there_s", "back_s"), (1 << 20) / rate(set(lineup.nodes(group))))
        for group in lineup.groups
        for process in group.processes
    ]


def ranks() -> RankMap:
    """Two nodes of 8: 6 actor ranks and an engine of TP 2 on each."""
    sizes = [
        RoleSize("actor", num_nodes=2, num_gpus_per_node=6),
        RoleSize("rollout", num_nodes=2, engines=2, tp=2),
    ]
    return place(Topology.uniform(["n1", "n2"], 8), sizes)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 64])
def test_every_node_has_partners_and_no_round_uses_a_node_twice(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    lineup = links(names, {})
    met = dict.fromkeys(names, 0)
    for stage in lineup.stages:
        processes = [process for group in stage for process in group.processes]
        assert len(processes) == len(set(processes))
        for process in processes:
            met[names[process]] += 1
    assert len({group.name for group in lineup.groups}) == len(lineup.groups)  # no pair meets twice
    assert min(met.values()) >= min(count - 1, 3)
    assert max(met.values()) <= 4
    assert links(["n1"], {}).groups == []


def test_the_groups_are_those_of_the_rank_map() -> None:
    lineup = role_groups(ranks())
    found = {(group.kind, group.name): group.processes for group in lineup.groups}
    assert len(lineup.processes) == 16
    assert {process.node for process in lineup.processes} == {"n1", "n2"}
    assert len(found["ZeRO", "actor"]) == 12
    assert len(found["sync", "weight sync"]) == 16
    assert [lineup.nodes(group) for group in lineup.stages[0]] == [("n1",), ("n2",)]
    assert [len(group.processes) for group in lineup.stages[0]] == [2, 2]
    without = role_groups(ranks(), {"n2"})
    assert {process.node for process in without.processes} == {"n1"}
    assert len(without.groups[1].processes) == 6
    order = orders_for(lineup, "n2")
    assert {slot for _, slot in order["processes"]} == set(range(8))
    asked = [group[0] for stage in order["stages"] for group in stage]
    assert asked == [group.name for group in lineup.groups if "n2" in lineup.nodes(group)]


def test_nodes_without_ranks_have_no_groups() -> None:
    assert role_groups(RankMap(Topology.uniform(NODES, 2), {})).groups == []


def test_a_slow_node_is_named_and_its_partners_are_not() -> None:
    lineup = links(NODES, {})
    check = judge_links(outcomes(lineup, reports(lineup, lambda nodes: FAST / 10 if "n4" in nodes else FAST)))
    (finding,) = check.findings
    assert (finding.verdict, finding.nodes, finding.avoid) == (WARNING, ("n4",), True)
    assert "the link of n4 carries 10 MB/s, those of its peers 100 MB/s (median)" in finding.said
    assert "--exclude=n4" in finding.remedy
    even = judge_links(outcomes(lineup, reports(lineup, lambda nodes: FAST / 2 if "n4" in nodes else FAST)))
    assert even.verdict == OK


def test_a_slow_pair_is_named() -> None:
    lineup = links(NODES, {})
    slow = lineup.nodes(lineup.groups[0])
    check = judge_links(outcomes(lineup, reports(lineup, lambda nodes: FAST / 10 if nodes == set(slow) else FAST)))
    (finding,) = check.findings
    assert f"between {slow[0]} and {slow[1]} pass 10 MB/s, though both have links of 100 MB/s" in finding.said


def test_pairs_that_were_not_tried_are_one_warning() -> None:
    lineup = links(NODES, {})
    late = [
        {"process": process, "group": group.name, "late": True}
        for group in lineup.groups
        for process in group.processes
    ]
    (finding,) = judge_links(outcomes(lineup, late)).findings
    assert (finding.verdict, finding.nodes) == (WARNING, ())
    assert finding.said == f"{len(lineup.groups)} pairs were not tried: not all of its ranks came in time"


def test_two_nodes_have_no_peers_and_are_compared_with_what_their_interfaces_are_made_for() -> None:
    lineup = links(["n1", "n2"], {})
    slow, fast = (outcomes(lineup, reports(lineup, lambda nodes, rate=rate: rate)) for rate in (1e7, 2e8))
    assert judge_links(slow).verdict == OK  # nothing is known of them
    assert judge_links(slow, {"n1": 10_000, "n2": 0}).verdict == OK
    assert judge_links(slow, {"n1": 100, "n2": 10_000}).verdict == OK
    assert judge_links(fast, {"n1": 200_000, "n2": 400_000}).verdict == OK
    (finding,) = judge_links(slow, {"n1": 10_000, "n2": 25_000}).findings
    assert finding.verdict == WARNING
    assert finding.said == "between n1 and n2 pass 10 MB/s, and their interfaces are made for 1250 MB/s"


def test_a_slow_engine_is_named() -> None:
    sizes = [RoleSize("actor", num_nodes=4, num_gpus_per_node=2), RoleSize("rollout", num_nodes=4, engines=4, tp=2)]
    lineup = role_groups(place(Topology.uniform(NODES[:4], 4), sizes))
    check = judge_groups(outcomes(lineup, reports(lineup, lambda nodes: FAST / 10 if nodes == {"n3"} else FAST)))
    (finding,) = check.findings
    assert (finding.nodes, finding.avoid) == (("n3",), True)
    assert "TP group engine 2 (2 ranks) moves 10 MB/s, its peers 100 MB/s (median)" in finding.said


def test_a_group_that_fails_names_those_who_say_so() -> None:
    lineup = role_groups(ranks())
    said = reports(lineup, lambda nodes: FAST)
    broken = [{"process": 3, "group": "actor", "error": "Connection refused"}]
    check = judge_groups(
        outcomes(lineup, [each for each in said if each["group"] != "actor" or each["process"] != 3] + broken)
    )
    (finding,) = check.findings
    assert (finding.verdict, finding.nodes) == (FAILED, ("n1",))
    assert "ZeRO group actor (12 ranks) does not work on n1: Connection refused" in finding.said


def test_a_rank_that_stands_still_and_one_that_never_came() -> None:
    lineup = role_groups(ranks())
    said = [each for each in reports(lineup, lambda nodes: FAST) if each["group"] != "weight sync"]
    begun = [{"process": process, "group": "weight sync", "together": True} for process in range(16)]
    (stuck,) = judge_groups(outcomes(lineup, said + begun)).findings
    assert stuck.verdict == FAILED
    assert "they did not get through" in stuck.said
    (late,) = judge_groups(outcomes(lineup, said + [{**each, "late": True} for each in begun[:-1]])).findings
    assert (late.verdict, late.nodes) == (WARNING, ())  # importing torch from a cold file system is no defect
    assert "was not tried: not all of its ranks came in time on n2" in late.said


def test_spares() -> None:
    assert chosen(NODES, (), (), 2) == ["n1", "n2", "n3"]
    assert chosen(NODES, ("n1", "n3"), ("n1",), 2) == ["n2", "n4", "n5"]
    assert chosen(NODES, ("n5",), (), 2) == ["n1", "n2", "n3"]
    assert chosen(NODES, ("n1", "n3", "n5"), ("n1",), 2) == ["n2", "n3", "n4"]  # a slow node before one that fails
    assert chosen(NODES, NODES, NODES, 2) == ["n1", "n2", "n3"]  # the report says why the run ends
    with pytest.raises(PlacementError, match=r"cluster.spares = 5, but the allocation has 5 nodes"):
        chosen(NODES, (), (), 5)
