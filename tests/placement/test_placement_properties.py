"""What holds for every placement, and that a placement is found whenever there is one."""

from __future__ import annotations

import re
from itertools import combinations
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.packing import Block
from slurm_rlhf.placement.rank_map import RankMap, make_blocks, place
from slurm_rlhf.placement.topology import Node, RoleSize, Topology

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


def check_slots(rank_map: RankMap, colocate: list[frozenset[str]]) -> None:
    users: dict[tuple[str, int], set[str]] = {}
    for role, shares in rank_map.roles.items():
        for share in shares:
            assert len(set(share.gpus)) == len(share.gpus)
            assert set(share.gpus) <= set(range(rank_map.topology.node(share.node).gpus))
            for gpu in share.gpus:
                users.setdefault((share.node, gpu), set()).add(role)
    for roles in users.values():
        assert len(roles) == 1 or frozenset(roles) in colocate


def check_tp_groups(rank_map: RankMap, rollout: RoleSize) -> None:
    groups = rank_map.tp_groups
    assert [group.engine for group in groups] == list(range(rollout.engines))
    for group in groups:
        start = group.gpus[0]
        assert start % rollout.tp == 0
        assert group.gpus == tuple(range(start, start + rollout.tp))
        assert group.ranks == tuple(range(group.engine * rollout.tp, (group.engine + 1) * rollout.tp))


# Nodes of 6, 7 and 8: only the last leaves room for the fourth engine, and only if the critic is not there.
ODD = Case(
    Topology(tuple(Node(f"n{i}", gpus) for i, gpus in enumerate((6, 7, 8)))),
    [RoleSize("critic", 1, 5), RoleSize("actor", 2, 4), RoleSize("rollout", 0, tp=2, engines=4)],
    [],
)


@settings(max_examples=400, deadline=None)
@example(case=ODD, seed=Random(1))
@given(case=cases(), seed=st.randoms())
def test_placements(case: Case, seed) -> None:
    blocks = make_blocks(case.roles, case.colocate)
    possible = fits([node.gpus for node in case.topology.nodes], blocks)
    event("fits" if possible else "does not fit")
    if not possible:
        with pytest.raises(PlacementError) as error:
            place(*case)
        check_advice(case, str(error.value))
        return
    rank_map = place(*case)
    check_sizes(rank_map, case.roles)
    check_slots(rank_map, case.colocate)
    check_tp_groups(rank_map, next(size for size in case.roles if size.engines))
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
