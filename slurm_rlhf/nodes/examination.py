"""Ask the nodes and judge what they say: start agents, hear their facts, let them run collectives, within a minute."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_rlhf.nodes import network_checks, node_checks
from slurm_rlhf.nodes.facts import Introduction, NodeFacts, Orders
from slurm_rlhf.nodes.groups import Outcome, links, role_groups
from slurm_rlhf.nodes.needs import Needs
from slurm_rlhf.nodes.network_checks import names
from slurm_rlhf.nodes.node_look import MISSING
from slurm_rlhf.nodes.report import FAILED, Check, Report
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.replacement import chosen

if TYPE_CHECKING:
    from slurm_rlhf.nodes.agent_steps import AgentServer
    from slurm_rlhf.nodes.interview import Interview

INTRODUCED, FACTS, LINKS, GROUPS = 0.35, 0.45, 0.75, 0.95
"""Shares of the time limit after which the next stage begins, without the nodes that are missing."""
_PEERS = 8  # nodes that a node tries to reach on either side of it in the list


@dataclass(frozen=True, slots=True)
class Question:
    """Say what is to be examined. `place` makes the rank map for some of the nodes; `ranks` is the one for now."""

    nodes: tuple[str, ...]
    here: str
    needs: Needs
    versions: Mapping[str, str]  # package -> version here; in a container those of the first node count
    ranks: RankMap
    place: Callable[[Sequence[str]], RankMap]
    spares: int = 0
    measure: bool = True  # links and groups
    thorough: bool = False  # measure them even if no run can start anyhow
    inside: bool = False  # the agents run in a container, and this process does not
    started: str = ""  # the program that is to run on the nodes
    equipment: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by node, where its agent cannot know it
    limit_s: float = 60.0


def examine_nodes(asked: Question, agents: AgentServer) -> tuple[Report, RankMap]:
    """Examine the nodes; return what was found, and the rank map of those that a run should take.

    Blocks for at most `limit_s`. The agents stay. Raises RunError if no agent can be started, OSError for a bad run
    directory.
    """
    from slurm_rlhf.nodes.interview import Interview

    talk = Interview(agents, asked.limit_s)
    with canary_in(Path(asked.needs.run_dir)) as (canary, token):
        agents.begin(_orders(asked, agents, canary))
        talk.meet(asked.nodes, INTRODUCED)
        talk.learn({node: _peers(node, asked, talk.met) for node in list(talk.met)}, FACTS)
    facts = {
        node: replace(talk.facts[node], equipment=asked.equipment.get(node, talk.facts[node].equipment))
        for node in asked.nodes
        if node in talk.facts
    }
    mine = dict(asked.versions)
    if asked.inside and facts:
        mine = {**next(iter(facts.values())).versions, "slurm_rlhf": mine.get("slurm_rlhf", MISSING)}
    unmeasured = "" if asked.measure else "preflight = quick"
    seen = _measured(talk, Evidence(asked, mine, token, facts, agents.said(), unmeasured=unmeasured))
    talk.end()
    report, ranks = Report(asked.nodes, judge(seen), talk.seconds()), _placed(seen)
    taken = {*(node.name for node in ranks.topology.nodes), *asked.ranks.topology.workers}
    gone = tuple(node for node in report.bad_nodes() if node not in taken)
    return replace(report, left_out=gone), ranks


def _measured(talk: Interview, seen: Evidence) -> Evidence:
    """Add links and groups. A run that cannot start anyhow is to end in seconds, without them."""
    asked = seen.asked
    if not asked.measure:
        return seen
    if not (asked.thorough or asked.spares) and Report(asked.nodes, judge(seen), 0.0).verdict == FAILED:
        return replace(seen, unmeasured="a run cannot start here anyhow")
    unreached = {node for each in names(seen.facts).findings if each.verdict == FAILED for node in each.nodes}
    away = (set(asked.nodes) - set(talk.met)) | unreached | set(asked.ranks.topology.workers)  # workers need no GPU
    slots = {share.node: min(share.gpus) for shares in asked.ranks.roles.values() for share in shares}
    pairs = links([node for node in asked.nodes if node not in away], slots)
    seen = replace(seen, links=talk.measure_links(pairs, asked.ranks.topology, LINKS))
    ranks = _placed(seen)
    away |= {node for node in asked.nodes if node not in talk.here}
    return replace(seen, groups=talk.measure_groups(role_groups(ranks, away), ranks.topology, GROUPS))


def _placed(seen: Evidence) -> RankMap:
    """Return the rank map on good nodes, where there are nodes to spare."""
    asked = seen.asked
    if not asked.spares:
        return asked.ranks
    report = Report(asked.nodes, judge(seen), 0.0)
    nodes = [node for node in asked.nodes if node not in asked.ranks.topology.workers]
    return asked.place(chosen(nodes, report.bad_nodes(), report.bad_nodes(avoided=False), asked.spares))


@contextmanager
def canary_in(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Write a file into the run directory that the nodes are asked to read; yield it and its contents."""
    run_dir.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    canary = run_dir / f".canary.{token}"
    canary.write_text(token, encoding="utf-8")
    try:
        yield canary, token
    finally:
        canary.unlink(missing_ok=True)


def _orders(asked: Question, agents: AgentServer, canary: Path) -> Orders:
    return agents.orders(
        canary=str(canary.absolute()),
        places=asked.needs.places,
        sandbox=asked.needs.sandbox,
        # Without GPUs the reason is of interest, but nvidia-smi on each node of a run on CPUs is not.
        gpus=bool(asked.needs.wanted.slots),
        groups=asked.measure,
        limit_s=asked.limit_s,
    )


def _peers(node: str, asked: Question, met: Mapping[str, Introduction]) -> dict[str, int]:
    """Choose whom a node tries to reach: its neighbours in the list, and the conductor's node."""
    ring = [other for other in asked.nodes if other in met]
    at = ring.index(node) if node in ring else 0
    near = [ring[(at + step) % len(ring)] for distance in range(1, _PEERS + 1) for step in (distance, -distance)]
    return {other: met[other].port for other in dict.fromkeys([*near, asked.here]) if other != node and other in met}


@dataclass(frozen=True, slots=True)
class Evidence:
    """Hold what was asked and what came back."""

    asked: Question
    versions: Mapping[str, str]  # package -> version in the conductor
    token: str  # in the canary
    facts: Mapping[str, NodeFacts]
    said: str = ""  # output of the launcher
    links: Sequence[Outcome] = ()
    groups: Sequence[Outcome] = ()
    unmeasured: str = ""  # why there are no links and groups


def judge(seen: Evidence) -> tuple[Check, ...]:
    """Return all checks. Those of the network need several nodes."""
    asked, facts, needs = seen.asked, seen.facts, seen.asked.needs
    slots = needs.wanted.slots
    checks = [network_checks.answers(facts, asked.nodes, seen.said, asked.started)]
    if not facts:
        return tuple(checks)  # without an answer there are no facts to check
    if len(asked.nodes) > 1:
        checks += [
            network_checks.names(facts),
            network_checks.interfaces(facts, asked.here),
            network_checks.clocks(facts),
            node_checks.packages(facts, seen.versions),
        ]
    checks += [
        node_checks.run_directory(facts, needs, seen.token),
        node_checks.places(facts),
        node_checks.space(facts, needs),
        node_checks.shared_memory(facts, needs),
        node_checks.limits(facts, needs),
        node_checks.gpus(facts, needs),
        *([node_checks.sandboxes(facts)] if needs.sandbox else []),
        *([network_checks.servers(needs.servers)] if needs.servers else []),
        *([node_checks.compilers({node: facts[node] for node in facts if node in slots})] if slots else []),
    ]
    if seen.unmeasured:
        return (*checks, Check("links and groups", f"not measured: {seen.unmeasured}"))
    return (
        *checks,
        network_checks.links(seen.links, {node: each.link_mbits for node, each in facts.items()}),
        network_checks.groups(seen.groups),
    )
