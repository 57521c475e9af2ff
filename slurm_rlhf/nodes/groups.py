"""Which processes join which collectives: pure, from the nodes and the rank map."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slurm_rlhf.config.roles import ACTOR, ROLES, ROLLOUT
from slurm_rlhf.placement.rank_map import RankMap

LINK, ZERO, TP, SYNC = "link", "ZeRO", "TP", "sync"
MOST_ROUNDS = 4
"""Most partners of a node: further ones take time and show nothing new."""


class GroupProcess(NamedTuple):
    """Name a process that measures: it stands for the ranks on one slot of a node."""

    node: str
    slot: int


@dataclass(frozen=True, slots=True)
class Group:
    """Describe one group of processes; `processes` are indexes into `Lineup.processes`."""

    name: str
    kind: str
    processes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lineup:
    """Hold processes and the stages that they go through; the groups of a stage share no process."""

    name: str
    processes: tuple[GroupProcess, ...]
    stages: tuple[tuple[Group, ...], ...]

    @property
    def groups(self) -> list[Group]:
        return [group for stage in self.stages for group in stage]

    def nodes(self, group: Group) -> tuple[str, ...]:
        """Return the nodes of a group, each once."""
        return tuple(dict.fromkeys(self.processes[process].node for process in group.processes))


@dataclass(frozen=True, slots=True)
class Figures:
    """Hold what the slowest member of a group measured; seconds."""

    latency_s: float  # time of the smallest all-reduce, or of a round trip
    there_s: float  # a large all-reduce, or sending over a link
    back_s: float  # a large broadcast, or the way back
    size: int  # bytes

    @property
    def rate(self) -> float:
        """Return bytes per second of the slower of the two large operations."""
        return self.size / max(self.there_s, self.back_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold what became of a group: figures, or why there are none and on which of its nodes."""

    group: Group
    nodes: tuple[str, ...]
    figures: Figures | None = None
    error: str = ""
    culprits: tuple[str, ...] = ()
    tried: bool = True  # False: not all of its members came, which need not be the group's fault


def links(nodes: Sequence[str], slots: Mapping[str, int]) -> Lineup:
    """Pair the nodes anew in each round, as in a tournament; `slots`: the slot that stands for a node."""
    processes = tuple(GroupProcess(node, slots.get(node, 0)) for node in nodes)
    table: list[int | None] = [*range(len(nodes)), *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(min(len(table) - 1, MOST_ROUNDS) if len(nodes) > 1 else 0):
        half = len(table) // 2
        pairs = list(zip(table[:half], reversed(table[half:]), strict=True))
        rounds.append(tuple(_link(nodes, a, b) for a, b in pairs if a is not None and b is not None))
        table = [table[0], table[-1], *table[1:-1]]
    return Lineup("links", processes, tuple(rounds))


def _link(nodes: Sequence[str], one: int, other: int) -> Group:
    first, second = sorted((one, other))
    return Group(f"{nodes[first]} - {nodes[second]}", LINK, (first, second))


def role_groups(ranks: RankMap, without: Collection[str] = ()) -> Lineup:
    """List the groups that a run with this rank map makes: of each engine, each role, and of the weight sync.

    Nodes in `without` do not take part; a group that has fewer than two members then is left out.
    """
    slots = {(share.node, slot) for shares in ranks.roles.values() for share in shares for slot in share.gpus}
    order = {node.name: number for number, node in enumerate(ranks.topology.nodes)}
    processes = tuple(
        GroupProcess(*at) for at in sorted(slots, key=lambda at: (order[at[0]], at[1])) if at[0] not in without
    )
    number = {process: index for index, process in enumerate(processes)}

    def members(places: Iterator[tuple[str, int]]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(number[process] for place in places if (process := GroupProcess(*place)) in number))

    engines = [Group(f"engine {tp.engine}", TP, members((tp.node, slot) for slot in tp.gpus)) for tp in ranks.tp_groups]
    stages = [engines]
    stages += [
        [Group(role, ZERO, members(_places(ranks, role)))] for role in ranks.roles if ROLES[role].kind != "engine"
    ]
    actor = members(_places(ranks, ACTOR))
    everyone = members(place for role in (ACTOR, ROLLOUT) for place in _places(ranks, role))
    if set(everyone) != set(actor):
        stages.append([Group("weight sync", SYNC, everyone)])
    kept = [tuple(group for group in stage if len(group.processes) > 1) for stage in stages]
    return Lineup("groups", processes, tuple(stage for stage in kept if stage))


def _places(ranks: RankMap, role: str) -> Iterator[tuple[str, int]]:
    return ((share.node, slot) for share in ranks.roles.get(role, ()) for slot in share.gpus)


def orders_for(lineup: Lineup, node: str) -> dict[str, Any]:
    """Return what the agent of `node` gets: its processes with their slots, and the groups in which they are."""
    mine = {number: process.slot for number, process in enumerate(lineup.processes) if process.node == node}
    stages = [
        [[group.name, list(group.processes)] for group in stage if any(process in mine for process in group.processes)]
        for stage in lineup.stages
    ]
    return {"name": lineup.name, "processes": [[process, slot] for process, slot in mine.items()], "stages": stages}


def outcomes(lineup: Lineup, reports: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Put together what the members reported of each group; the last report of a member counts."""
    of: dict[str, dict[int, Mapping[str, Any]]] = {group.name: {} for group in lineup.groups}
    for report in reports:
        if report.get("group") in of and isinstance(report.get("process"), int):
            of[report["group"]][report["process"]] = report
    return [_outcome(lineup, group, of[group.name]) for group in lineup.groups]


def _outcome(lineup: Lineup, group: Group, reports: Mapping[int, Mapping[str, Any]]) -> Outcome:
    """Judge one group. Only what went wrong after all members had come is the group's fault."""
    nodes = lineup.nodes(group)

    def where(processes: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(lineup.processes[process].node for process in processes))

    late = [process for process in group.processes if process not in reports or "late" in reports[process]]
    broken = [process for process, said in reports.items() if said.get("error")]
    stuck = [process for process, said in reports.items() if "together" in said]
    if broken:
        return Outcome(group, nodes, None, str(reports[broken[0]]["error"]), where(broken))
    if late:
        absent = [process for process in late if process not in reports]
        return Outcome(group, nodes, None, "not all of its ranks came in time", where(absent), tried=False)
    if stuck:
        return Outcome(group, nodes, None, "they did not get through", where(stuck))
    said = list(reports.values())
    worst = {name: max(float(each[name]) for each in said) for name in ("latency_s", "there_s", "back_s")}
    return Outcome(group, nodes, Figures(**worst, size=int(said[0]["size"])))
