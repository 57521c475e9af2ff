"""Ranks on slots: worked cases, and properties of any layout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from waiting import HANG_S

from slurm_rlhf.cluster.slurm_environment import expand
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement import packing
from slurm_rlhf.placement.packing import Block
from slurm_rlhf.placement.rank_map import RankMap, draw, make_blocks, place
from slurm_rlhf.placement.topology import Node, RoleSize, Topology, nodes_needed, numbered_names


def nodes(count: int, gpus: int) -> Topology:
    return Topology.uniform(numbered_names(count), gpus)


def engines(count: int, tp: int = 1, num_nodes: int = 0) -> RoleSize:
    return RoleSize("rollout", num_nodes, tp=tp, engines=count)


def where(rank_map: RankMap, role: str) -> dict[str, tuple[int, ...]]:
    return {share.node: share.gpus for share in rank_map.roles[role]}


def test_two_nodes_of_eight_hold_six_actor_and_two_rollout_slots_each() -> None:
    for rollout in (engines(4), engines(2, tp=2), engines(4, num_nodes=2)):
        rank_map = place(nodes(2, 8), [RoleSize("actor", 2, 6), rollout])
        assert where(rank_map, "actor") == {"node1": (0, 1, 2, 3, 4, 5), "node2": (0, 1, 2, 3, 4, 5)}
        assert where(rank_map, "rollout") == {"node1": (6, 7), "node2": (6, 7)}
        assert rank_map.worlds == {"actor": 12, "rollout": 4}
    assert rank_map.roles["actor"][1].ranks == (6, 7, 8, 9, 10, 11)


def test_how_many_nodes_are_needed_is_found_without_all_orders_of_the_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "permutations", None)  # those of many roles take minutes
    assert nodes_needed(8, make_blocks([RoleSize("actor", 1, 4), engines(8)], [])) == 2


def test_roles_get_nodes_of_their_own_where_there_are_enough() -> None:
    roles = [RoleSize("actor", 16, 8), engines(16, tp=8)]
    rank_map = place(nodes(32, 8), roles)
    assert len(where(rank_map, "actor")) == len(where(rank_map, "rollout")) == 16
    assert not set(where(rank_map, "actor")) & set(where(rank_map, "rollout"))


def test_engines_are_spread_evenly_over_the_nodes_asked_for() -> None:
    roles = [RoleSize("actor", 2, 4), engines(5, num_nodes=3)]
    shares = place(nodes(3, 8), roles).roles["rollout"]
    assert sorted(len(share.gpus) for share in shares) == [1, 2, 2]
    shares = place(nodes(4, 8), [RoleSize("actor", 4, 6), engines(5)]).roles["rollout"]
    assert [len(share.gpus) for share in shares] == [2, 2, 1]  # as few nodes as hold them
    alike = place(Topology((Node("a", 8), Node("b", 8), Node("c", 4))), [engines(6, num_nodes=2)])
    assert [*where(alike, "rollout")] == ["a", "b"]  # and not the smaller one, though it has room


def test_colocation_with_a_role_that_does_not_run_is_ignored() -> None:
    rank_map = place(nodes(1, 2), [RoleSize("actor", 1, 1), engines(1)], [frozenset(("actor", "reference"))])
    assert rank_map.worlds == {"actor": 1, "rollout": 1}


@pytest.mark.parametrize("other", [RoleSize("reference", 1, 4), RoleSize("reference", 2, 2), engines(3, tp=2)])
def test_colocated_roles_of_unlike_size(other: RoleSize) -> None:
    with pytest.raises(PlacementError, match=r"colocated.*actor.num_gpus_per_node = 4; but (ref|vllm)\.num_"):
        place(nodes(2, 8), [RoleSize("actor", 2, 4), other], [frozenset(("actor", other.role))])


def test_uneven_nodes() -> None:
    topology = Topology((Node("small", 4), Node("big1", 8), Node("big2", 8)))
    rank_map = place(topology, [RoleSize("actor", 2, 8), RoleSize("critic", 1, 2), engines(1, tp=2)])
    assert where(rank_map, "actor") == {"big1": tuple(range(8)), "big2": tuple(range(8))}
    assert where(rank_map, "critic") == {"small": (0, 1)}
    assert where(rank_map, "rollout") == {"small": (2, 3)}


def test_a_node_listed_twice_and_no_node() -> None:
    with pytest.raises(PlacementError, match="at least one node"):
        Topology(())
    with pytest.raises(PlacementError, match="each once: gpu1, gpu2, gpu1"):
        Topology.uniform(["gpu1", "gpu2", "gpu1"], 8)


@pytest.mark.parametrize(
    ("count", "gpus", "roles", "expected"),
    [
        (2, 8, [RoleSize("actor", 2, 8), engines(2, tp=2)], "need 20 GPUs; given: 2 nodes with 16 GPUs (8 each)"),
        (2, 8, [RoleSize("actor", 2, 8), engines(2, tp=2)], "or run on 3 nodes of 8 GPUs (sbatch --nodes=3)"),
        (2, 8, [RoleSize("actor", 2, 6), engines(9)], "asked for: actor.num_nodes = 2, actor.num_gpus_per_node = 6,"),
        (1, 8, [engines(1, tp=16)], "vllm.tensor_parallel_size = 16, but an engine lives on one node"),
        (1, 8, [engines(1, tp=16)], "no number of nodes with 8 GPUs holds them: lower these keys"),
        (2, 4, [RoleSize("critic", 1, 8), engines(1)], "critic.num_gpus_per_node = 8, but the largest node, node1"),
        (2, 4, [RoleSize("reference", 3, 4), engines(1)], "ref.num_nodes = 3, but there are 2 nodes"),
        (4, 8, [engines(2, num_nodes=3)], "vllm.num_nodes = 3, but there are only 2 engines"),
        (2, 8, [RoleSize("actor", 2, 5), RoleSize("critic", 1, 4), engines(1)], "cannot lie side by side"),
        (1, 8, [RoleSize("actor", 1, 8), RoleSize("critic", 1, 8)], "or run on 2 nodes of 8 GPUs (sbatch --nodes=2)"),
        (1, 2, [RoleSize(r, 1, 1) for r in ("actor", "critic", "reference")], "or run on 2 nodes of 2 GPUs"),
    ],
)  # fmt: skip
def test_errors_say_why_and_how_many_nodes_do(count: int, gpus: int, roles: list[RoleSize], expected: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(expected)):
        place(nodes(count, gpus), roles)


def test_the_largest_of_unequal_nodes_is_named() -> None:
    with pytest.raises(PlacementError, match="but the largest node, b, has 4 GPUs"):
        place(Topology((Node("a", 2), Node("b", 4), Node("c", 3))), [RoleSize("critic", 1, 8)])


@pytest.mark.parametrize("shared", [True, False])
def test_the_work_grows_with_the_nodes_and_no_faster(shared: bool) -> None:
    few, many = calls_to_place(1000, shared), calls_to_place(10000, shared)
    assert many < 11 * few
    assert many < 10000 * 400


def calls_to_place(nodes: int, shared: bool) -> int:
    """How many functions are called to place roles on so many nodes of 8 GPUs."""
    if shared:
        roles = [RoleSize("actor", nodes, 4), RoleSize("critic", nodes, 2), engines(nodes, tp=2)]
    else:
        tenth = nodes // 10
        roles = [
            RoleSize("actor", 4 * tenth, 8),
            RoleSize("critic", tenth, 8),
            engines(4 * tenth, tp=8),
            RoleSize("reference", tenth, 8),
        ]
    topology = Topology.uniform(expand(f"gpu[00001-{nodes:05d}]"), 8)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        rank_map = place(topology, roles)
    finally:
        sys.setprofile(None)
    assert sum(rank_map.worlds.values()) == 8 * nodes
    return calls


def test_json_holds_the_whole_map() -> None:
    topology = Topology((Node("a", 4, 64, ("4", "5", "6", "7")), Node("b", 4, 64)))
    rank_map = place(topology, [RoleSize("actor", 2, 2), engines(2, tp=2)])
    text = json.dumps(rank_map.to_json())
    assert RankMap.from_json(json.loads(text)) == rank_map
    data = json.loads(text)
    assert data["nodes"][0] == {"name": "a", "gpus": 4, "cpus": 64, "devices": ["4", "5", "6", "7"]}
    assert data["roles"]["actor"] == [
        {"node": "a", "gpus": [0, 1], "ranks": [0, 1], "engines": []},
        {"node": "b", "gpus": [0, 1], "ranks": [2, 3], "engines": []},
    ]
    assert data["tp_groups"][1] == {"role": "rollout", "engine": 1, "node": "b", "gpus": [2, 3], "ranks": [2, 3]}


def test_drawing() -> None:
    roles = [RoleSize("actor", 2, 2), RoleSize("reference", 2, 2), engines(1, tp=2)]
    topology = Topology((Node("gpu1", 5), Node("gpu2", 4)))
    assert draw(place(topology, roles, [frozenset(("actor", "reference"))])).splitlines() == [
        "node  gpu0   gpu1   gpu2  gpu3  gpu4",
        "gpu1  A0+R0  A1+R1  .     .     .",
        "gpu2  A2+R2  A3+R3  E0.0  E0.1",
        "",
        "A actor: 4 ranks on 2 nodes",
        "R reference: 4 ranks on 2 nodes",
        "E rollout: 2 ranks on 1 node, 1 engine of TP 2",
        "6 of 9 GPUs used",
    ]
    assert "... 4 more nodes" in draw(place(nodes(10, 4), [RoleSize("actor", 10, 4)]), max_rows=6)


def test_planning_needs_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; import slurm_rlhf.cluster.resources, slurm_rlhf.placement.rank_map; "
        "print([m for m in ('torch', 'numpy', 'zmq', 'transformers') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert answer.stdout.strip() == "[]"


# --- placement properties ---------------------------------------------------------------------------------------------


PAIR = frozenset(("actor", "reference"))


class Case(NamedTuple):
    topology: Topology
    roles: list[RoleSize]
    colocate: list[frozenset[str]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 4))
    if draw(st.booleans()):
        gpus = [draw(st.sampled_from((4, 8)))] * count
    else:
        gpus = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    roles = []
    for role in draw(st.sets(st.sampled_from(("actor", "critic", "reference")))):
        roles.append(RoleSize(role, draw(st.integers(1, count)), draw(st.integers(1, 6))))
    num_nodes = draw(st.integers(0, min(2, count)))
    tp = draw(st.sampled_from((1, 2, 3, 4)))
    roles.append(RoleSize("rollout", num_nodes, tp=tp, engines=draw(st.integers(max(1, num_nodes), 6))))
    colocate = []
    if {size.role for size in roles} >= PAIR and draw(st.booleans()):
        actor = next(size for size in roles if size.role == "actor")
        roles = [size for size in roles if size.role != "reference"]
        roles.append(RoleSize("reference", actor.num_nodes, actor.num_gpus_per_node))
        colocate = [PAIR]
    return Case(Topology(tuple(Node(f"n{i}", gpus) for i, gpus in enumerate(gpus))), roles, colocate)


def fits(free: list[int], blocks: list[Block]) -> bool:
    """Whether `blocks` fit, by trying everything."""
    if not blocks:
        return True
    block, rest = blocks[0], blocks[1:]

    def after(amounts: dict[int, int]) -> list[int]:
        return [room - amounts.get(index, 0) for index, room in enumerate(free)]

    if block.per_node:
        roomy = [index for index, room in enumerate(free) if room >= block.per_node]
        return any(
            fits(after(dict.fromkeys(chosen, block.per_node)), rest) for chosen in combinations(roomy, block.num_nodes)
        )

    def spread(index: int, left: int, amounts: dict[int, int]) -> bool:
        if index == len(free):
            on_enough = not block.num_nodes or len(amounts) == block.num_nodes
            return left == 0 and on_enough and fits(after(amounts), rest)
        return any(
            spread(index + 1, left - some, {**amounts, index: some * block.tp} if some else amounts)
            for some in range(min(left, free[index] // block.tp) + 1)
        )

    return spread(0, block.engines, {})


def check_sizes(rank_map: RankMap, roles: list[RoleSize]) -> None:
    assert set(rank_map.roles) == {size.role for size in roles}
    for size in roles:
        shares = rank_map.roles[size.role]
        assert rank_map.world(size.role) == size.slots
        assert [rank for share in shares for rank in share.ranks] == list(range(size.slots))
        assert all(len(share.gpus) == len(share.ranks) for share in shares)
        order = [node.name for node in rank_map.topology.nodes]
        assert [share.node for share in shares] == sorted({share.node for share in shares}, key=order.index)
        if size.engines:
            assert len(shares) == size.num_nodes or not size.num_nodes
            assert all(len(share.engines) == len(share.gpus) for share in shares)
        else:
            assert [len(share.gpus) for share in shares] == [size.num_gpus_per_node] * size.num_nodes
            assert all(share.gpus == tuple(sorted(share.gpus)) for share in shares)


@settings(max_examples=400, deadline=None)
@given(case=cases(), seed=st.randoms())
def test_placements(case: Case, seed) -> None:
    blocks = make_blocks(case.roles, case.colocate)
    possible = fits([node.gpus for node in case.topology.nodes], blocks)
    event("fits" if possible else "does not fit")
    try:
        rank_map = place(*case)
    except PlacementError as error:
        assert not possible or len({node.gpus for node in case.topology.nodes}) > 2  # then a layout may not be found
        check_advice(case, str(error))
        return
    assert possible
    check_sizes(rank_map, case.roles)
    users: dict[tuple[str, int], set[str]] = {}
    for role, shares in rank_map.roles.items():
        for share in shares:
            assert len(set(share.gpus)) == len(share.gpus)
            assert set(share.gpus) <= set(range(rank_map.topology.node(share.node).gpus))
            for gpu in share.gpus:
                users.setdefault((share.node, gpu), set()).add(role)
    assert all(len(roles) == 1 or frozenset(roles) in case.colocate for roles in users.values())
    rollout = next(size for size in case.roles if size.engines)
    assert [group.engine for group in rank_map.tp_groups] == list(range(rollout.engines))
    for group in rank_map.tp_groups:
        start = group.gpus[0]
        assert start % rollout.tp == 0
        assert group.gpus == tuple(range(start, start + rollout.tp))
        assert group.ranks == tuple(range(group.engine * rollout.tp, (group.engine + 1) * rollout.tp))
    shuffled = list(case.roles)
    seed.shuffle(shuffled)
    assert place(case.topology, shuffled, case.colocate) == rank_map


def check_advice(case: Case, message: str) -> None:
    """The message has every size that is asked for, and the roles do fit on the nodes that it offers."""
    for size in case.roles:
        assert all(f"{key} = {value}" in message for key, value in size.settings().items())
    more = re.search(r"or run on (\d+) nodes of (\d+)", message)
    assert "lower these keys" in message
    if more:
        assert int(more[1]) > len(case.topology.nodes)
        larger = Topology.uniform([f"n{i}" for i in range(int(more[1]))], int(more[2]))
        place(larger, case.roles, case.colocate)


@given(count=st.integers(1, 6), actor=st.integers(1, 5), tp=st.sampled_from((1, 2)), colocated=st.booleans())
def test_roles_on_all_nodes_look_the_same_on_each(count: int, actor: int, tp: int, colocated: bool) -> None:
    roles = [
        RoleSize("actor", count, actor),
        RoleSize("reference", count, actor if colocated else 1),
        RoleSize("rollout", count, tp=tp, engines=count * (2 // tp)),
    ]
    topology = Topology.uniform([f"n{i}" for i in range(count)], 8)
    rank_map = place(topology, roles, [PAIR] if colocated else [])
    for shares in rank_map.roles.values():
        assert len(shares) == count
        assert len({share.gpus for share in shares}) == 1
