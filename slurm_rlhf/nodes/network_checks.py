"""Judge names, addresses, interfaces and clocks of the nodes: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from slurm_rlhf.errors import shortened
from slurm_rlhf.nodes.facts import NodeFacts
from slurm_rlhf.nodes.report import FAILED, WARNING, Check, Finding
from slurm_rlhf.workers.http_client import Health

Facts = Mapping[str, NodeFacts]

SKEW_S = 2.0
"""Clocks of a cluster with NTP agree to milliseconds; file systems keep times in seconds."""
SKEW_FAILS_S = 300.0
"""Munge and Kerberos refuse credentials that are five minutes old, or from the future."""


def exclude(*nodes: str) -> str:
    """Return the option that leaves nodes out of the next allocation."""
    return f"--exclude={','.join(nodes)}"


def answers(facts: Facts, nodes: Sequence[str], said: str, started: str) -> Check:
    """Name nodes from which nothing came. `said`: what the launcher printed; `started`: what was to run there."""
    silent = tuple(node for node in nodes if node not in facts)
    if not silent:
        return Check("answers", f"{len(nodes)} of {len(nodes)} nodes")
    lines = said.strip().splitlines()[-8:]
    words = "".join(f"\n    {line}" for line in lines)
    told = f"no answer from {shortened(silent, 4)}{'; the launcher says:' if lines else ''}{words}"
    remedy = (
        f"If that names nothing to mend: {started} did not run there. Install the environment on a file system that "
        f"all nodes share, or at the same place on each; leave a broken node out with {exclude(*silent)}"
    )
    return Check("answers", "", (Finding(FAILED, silent, told, remedy),))


def conductor(facts: Facts, where: str) -> Check:
    """Name nodes that do not reach the conductor's port; `where` is host and address of it."""
    found = tuple(
        Finding(
            FAILED,
            (node,),
            f"{node} cannot reach the conductor at {where}: {each.conductor}; it has {', '.join(each.addresses)}",
            f"Let a firewall pass connections between the job's nodes, or leave it out: {exclude(node)}",
        )
        for node, each in facts.items()
        if each.conductor
    )
    return Check("conductor", f"every node reaches {where}", found)


def names(facts: Facts) -> Check:
    """Name nodes whose names lead nowhere, to another node, or not back."""
    found: list[Finding] = []
    for culprit in facts:
        seen = {by: each for by, there in facts.items() for each in there.reached if each.node == culprit}
        own = facts[culprit].addresses
        by = shortened([by for by, each in seen.items() if each.problem], 3)
        bad = next((each for each in seen.values() if each.problem), None)
        strange = next((each for each in seen.values() if each.address and each.address not in own), None)
        mend = f"let {culprit} resolve to {facts[culprit].address or 'an address of its own'} on all nodes"
        if bad is not None and not bad.address:
            said = f"{by} cannot resolve the name {culprit}: {bad.problem}"
            found.append(Finding(FAILED, (culprit,), said, f"In /etc/hosts or DNS {mend}, or {exclude(culprit)}"))
        elif bad is not None:
            said = f"{by} cannot reach {culprit}, whose name is {bad.address} there: {bad.problem}"
            remedy = f"Its own address towards the conductor is {facts[culprit].address or 'not known'}"
            also = f" ({facts[culprit].interface}): {mend}, or {exclude(culprit)}"
            found.append(Finding(FAILED, (culprit,), said, remedy + also))
        elif strange is not None:
            said = f"the name {culprit} is {strange.address} elsewhere, and {culprit} has only {', '.join(own)}"
            found.append(Finding(FAILED, (culprit,), said, f"In /etc/hosts or DNS {mend}, or {exclude(culprit)}"))
    found += _back(facts)
    nameless = sorted(
        {each.node for there in facts.values() for each in there.reached if each.address and not each.name}
    )
    count = sum(len(there.reached) for there in facts.values())
    said = f"{count} names resolve and are reached" + (
        f"; no name for the address of {shortened(nameless, 4)}, which nothing here needs"
        if nameless
        else ", and their addresses have names"
    )
    return Check("names", said if count else "one node: none is looked up", tuple(found))


def _back(facts: Facts) -> list[Finding]:
    """Warn of addresses that have the name of another node of the job; an alias such as gpu007-ib is none."""
    wrong = {
        (each.node, each.address, each.name.partition(".")[0])
        for there in facts.values()
        for each in there.reached
        if each.name.partition(".")[0] in facts and each.name.partition(".")[0] != each.node
    }
    return [
        Finding(
            WARNING,
            (node,),
            f"{address}, the address of {node}, has the name {name}, which is another node's",
            "Mend /etc/hosts or the reverse zone of DNS: log lines and libraries that look up a peer's name mislead",
        )
        for node, address, name in sorted(wrong)
    ]


def interfaces(facts: Facts, here: str) -> Check:
    """Warn of nodes that use another network than most, fail for exported interfaces that do not exist.

    `here` is the conductor's own node: alone on loopback towards itself, where its neighbours show the network.
    """
    found = [
        Finding(
            FAILED,
            (node,),
            f"{node} has no such interface: {each.exported[0]}",
            f"Export a name that every node has, or none: the one that reaches the others counts; or {exclude(node)}",
        )
        for node, each in facts.items()
        if each.exported
    ]
    seen = {node: (each.interface, each.subnet) for node, each in facts.items() if each.interface and node != here}
    usual = Counter(seen.values()).most_common(1)
    for node, (interface, subnet) in seen.items():
        if usual and (interface, subnet) != usual[0][0]:
            most, net = usual[0][0]
            said = f"{node} reaches the conductor by {interface} in {subnet or 'no subnet'}, most by {most} in {net}"
            remedy = f"export NCCL_SOCKET_IFNAME={most} GLOO_SOCKET_IFNAME={most}, or {exclude(node)}"
            found.append(Finding(WARNING, (node,), said, remedy))
    told = ", ".join(f"{interface} in {subnet}" for interface, subnet in dict.fromkeys(seen.values()))
    return Check("interfaces", told or "loopback", tuple(found))


def clocks(facts: Facts) -> Check:
    """Name nodes whose clock differs from the conductor's."""
    found = tuple(
        Finding(
            FAILED if abs(each.skew_s) >= SKEW_FAILS_S else WARNING,
            (node,),
            f"the clock of {node} is {_duration(abs(each.skew_s))} {'ahead' if each.skew_s > 0 else 'behind'}",
            f"Set it (chronyc makestep, as root), or {exclude(node)}: credentials of munge are refused from 300 s on, "
            "and times of files and log lines mislead",
        )
        for node, each in facts.items()
        if abs(each.skew_s) >= SKEW_S
    )
    return Check("clocks", f"all within {SKEW_S:g} s", found)


def servers(found: Sequence[Health]) -> Check:
    """Name the servers of rewards and environments that are away. A run waits for them, so it may start."""
    away = tuple(
        Finding(
            WARNING,
            (),
            f"{one.key}: {one.url} is not there: {one.away}",
            "Start it (slurm-rlhf serve-reward, serve-env), or correct the address or the token: the run waits "
            "while none answers",
        )
        for one in found
        if one.away
    )
    told = "; ".join(f"{one.url} serves {one.serves or one.key}" for one in found if not one.away)
    return Check("servers", told, away)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
