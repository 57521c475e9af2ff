"""Put the checks together, in the order of the table: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_rlhf.preflight import file_checks, network_checks, node_checks, speed_checks
from slurm_rlhf.preflight.facts import NodeFacts
from slurm_rlhf.preflight.groups import Outcome
from slurm_rlhf.preflight.needs import Needs
from slurm_rlhf.preflight.report import Check


@dataclass(frozen=True, slots=True)
class Evidence:
    """Hold what was asked and what came back."""

    nodes: tuple[str, ...]
    here: str  # the conductor's node
    where: str  # host, address and port of the conductor
    needs: Needs
    versions: Mapping[str, str]  # of the conductor
    token: str  # in the canary
    facts: Mapping[str, NodeFacts]
    job: str = ""
    said: str = ""  # by the launcher
    started: str = ""  # what was to run on the nodes
    links: Sequence[Outcome] = ()
    groups: Sequence[Outcome] = ()
    unmeasured: str = ""  # why there are no links and groups


def judge(seen: Evidence) -> tuple[Check, ...]:
    """Return all checks. Those of the network need several nodes."""
    facts, needs = seen.facts, seen.needs
    several = len(seen.nodes) > 1
    checks = [network_checks.answers(facts, seen.nodes, seen.said, seen.started)]
    if seen.job:
        checks.append(node_checks.allocation(needs, seen.nodes, seen.job))
    if not facts:
        return tuple(checks)  # nothing is known of anything else
    if several:
        checks += [
            network_checks.names(facts),
            network_checks.conductor(facts, seen.where),
            network_checks.interfaces(facts, seen.here),
            network_checks.clocks(facts),
            node_checks.packages(facts, seen.versions),
        ]
    checks += [
        file_checks.run_directory(facts, needs, seen.token),
        file_checks.places(facts),
        file_checks.space(facts, needs),
        file_checks.locks(needs),
        node_checks.shared_memory(facts, needs),
        node_checks.limits(facts, needs),
        node_checks.ports(facts, needs),
        node_checks.gpus(facts, needs),
    ]
    if seen.unmeasured:
        return (*checks, speed_checks.untested("links and groups", seen.unmeasured))
    return (
        *checks,
        speed_checks.links(seen.links, {node: each.link_mbits for node, each in facts.items()}),
        speed_checks.groups(seen.groups),
    )
