"""Judge names, addresses, interfaces and clocks of the nodes, and how fast links and groups are: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from slurm_rlhf.errors import shortened
from slurm_rlhf.nodes.facts import NodeFacts
from slurm_rlhf.nodes.groups import LINK, Figures, Outcome
from slurm_rlhf.nodes.report import Check, Finding, exclude, failed, warned
from slurm_rlhf.workers.http import Health

Facts = Mapping[str, NodeFacts]

SKEW_S = 2.0
"""Difference of clocks that is a warning: with NTP they agree to milliseconds; file systems keep times in seconds."""
SKEW_FAILS_S = 300.0
"""Difference of clocks that is an error: Munge and Kerberos refuse credentials of five minutes ago, or ahead."""


def answers(facts: Facts, nodes: Sequence[str], said: str, started: str) -> Check:
    """Name nodes from which nothing came. `said`: what the launcher printed; `started`: what was to run there."""
    silent = tuple(node for node in nodes if node not in facts)
    if not silent:
        return Check("answers", f"{len(nodes)} of {len(nodes)} nodes")
    lines = said.strip().splitlines()[-8:]
    words = "".join(f"\n    {line}" for line in lines)
    text = f"no answer from {shortened(silent, 4)}{'; the launcher says:' if lines else ''}{words}"
    remedy = (
        f"If that names nothing to mend: {started} did not run there. Install the environment on a file system that "
        f"all nodes share, or at the same place on each; leave a broken node out with {exclude(*silent)}"
    )
    return Check("answers", "", [failed(text, remedy, *silent)])


def names(facts: Facts) -> Check:
    """Name nodes whose names do not resolve, or resolve to another node."""
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
            found.append(failed(said, f"In /etc/hosts or DNS {mend}, or {exclude(culprit)}", culprit))
        elif bad is not None:
            said = f"{by} cannot reach {culprit}, whose name is {bad.address} there: {bad.problem}"
            remedy = f"Its own address towards the conductor is {facts[culprit].address or 'not known'}"
            also = f" ({facts[culprit].interface}): {mend}, or {exclude(culprit)}"
            found.append(failed(said, remedy + also, culprit))
        elif strange is not None:
            said = f"the name {culprit} is {strange.address} elsewhere, and {culprit} has only {', '.join(own)}"
            found.append(failed(said, f"In /etc/hosts or DNS {mend}, or {exclude(culprit)}", culprit))
    count = sum(len(there.reached) for there in facts.values())
    return Check("names", f"{count} names resolve and are reached" if count else "one node: none is looked up", found)


def interfaces(facts: Facts, here: str) -> Check:
    """Warn of nodes that use another network than most, fail for exported interfaces that do not exist.

    `here` is the conductor's own node: alone on loopback towards itself, where its neighbours show the network.
    """
    remedy = "Export a name that every node has, or none: the one that reaches the others counts; or"
    found = [
        failed(f"{node} has no such interface: {each.exported[0]}", f"{remedy} {exclude(node)}", node)
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
            found.append(warned(said, remedy, node))
    text = ", ".join(f"{interface} in {subnet}" for interface, subnet in dict.fromkeys(seen.values()))
    return Check("interfaces", text or "loopback", found)


def clocks(facts: Facts) -> Check:
    """Name nodes whose clock differs from the conductor's."""
    found = []
    for node, each in facts.items():
        if (off := abs(each.skew_s)) >= SKEW_S:
            by = f"{off:.1f} s" if off < 120 else f"{off / 60:.0f} min"
            said = f"the clock of {node} is {by} {'ahead' if each.skew_s > 0 else 'behind'}"
            remedy = (
                f"Set it (chronyc makestep, as root), or {exclude(node)}: credentials of munge are refused from 300 s "
                "on, and times of files and log lines mislead"
            )
            found.append((failed if off >= SKEW_FAILS_S else warned)(said, remedy, node))
    return Check("clocks", f"all within {SKEW_S:g} s", found)


def servers(found: Sequence[Health]) -> Check:
    """Name the servers of rewards and environments that are away. A run waits for them, so it may start."""
    remedy = (
        "Start it (slurm-rlhf serve-reward, serve-env), or correct the address or the token: the run waits while none "
        "answers"
    )
    away = [warned(f"{one.key}: {one.url} is not there: {one.away}", remedy) for one in found if one.away]
    text = "; ".join(f"{one.url} serves {one.serves or one.key}" for one in found if not one.away)
    return Check("servers", text, away)


SLOW = 1 / 3
"""Share of the peers' median rate; a link or group below it is named."""
FAR_BELOW = 1 / 10
"""Share of an interface's speed; of two nodes a link below it is named. One stream of bytes does not fill it."""
_STREAM_MBITS = 10_000  # expected of one TCP stream, however fast the interface
_MB = 1e6
_NOT_TRIED = "Importing torch is slow there, or an earlier group failed"


def links(outcomes: Sequence[Outcome], mbits: Mapping[str, int] | None = None) -> Check:
    """Name nodes all of whose links are slow, and single slow links between nodes that have faster ones.

    Two nodes have no peers: there the figure is what the slower interface is made for, by `mbits` of each node. With
    more, a node is as fast as its fastest link: a slow one makes the links of its partners slow, too.
    """
    found = [_broken(each) for each in outcomes if each.error and each.tried]
    if untried := [each for each in outcomes if not each.tried]:
        found.append(warned(f"{len(untried)} pairs were not tried: {untried[0].error}", _NOT_TRIED))
    rates = {each.nodes: each.figures.rate for each in outcomes if each.figures is not None}
    best: dict[str, float] = {}
    for nodes, rate in rates.items():
        for node in nodes:
            best[node] = max(rate, best.get(node, 0.0))
    others = {node: median(best[other] for other in best if other != node) for node in best if len(best) > 2}
    slow = {node for node, rate in others.items() if best[node] < SLOW * rate}
    for node in sorted(slow):
        said = f"the link of {node} carries {_rate(best[node])}, those of its peers {_rate(others[node])} (median)"
        remedy = f"Look at its cable, its port and NCCL_SOCKET_IFNAME, or leave it out: {exclude(node)}"
        found.append(warned(said, remedy, node, avoid=True))
    usual = median(rates.values()) if rates else 0.0
    for nodes, rate in rates.items():
        if not slow.intersection(nodes) and rate < SLOW * min(usual, *(best[node] for node in nodes)):
            said = f"between {' and '.join(nodes)} pass {_rate(rate)}, though both have links of {_rate(usual)}"
            remedy = f"Something on the way between these two is slow; leave one out: {exclude(nodes[-1])}"
            found.append(warned(said, remedy, nodes[-1], avoid=True))
    for nodes, rate in rates.items() if len(best) == 2 else ():
        made_for = min(_STREAM_MBITS, *((mbits or {}).get(node, 0) for node in nodes)) * _MB / 8
        if rate < FAR_BELOW * made_for:
            said = (
                f"between {' and '.join(nodes)} pass {_rate(rate)}, and their interfaces are made for {_rate(made_for)}"
            )
            remedy = "Look at cables, ports, and at what else uses this network; NCCL_SOCKET_IFNAME names another one"
            found.append(warned(said, remedy, *nodes))
    shown = [each.figures for each in outcomes if each.figures is not None]
    return Check("links", f"{len(shown)} pairs: {_span(shown)}" if shown else "one node: there are none", found)


def groups(outcomes: Sequence[Outcome]) -> Check:
    """Name groups that do not work, and those that are slow compared with groups of their kind and size."""
    found = [_broken(each) for each in outcomes if each.error]
    for each in outcomes:
        peers = [
            other.figures.rate
            for other in outcomes
            if other is not each and other.figures is not None and _size(other) == _size(each)
        ]
        if each.figures is None or len(peers) < 2 or each.figures.rate >= SLOW * median(peers):
            continue
        said = f"{_called(each)} moves {_rate(each.figures.rate)}, its peers {_rate(median(peers))} (median)"
        nodes = ", ".join(each.nodes)
        remedy = (
            f"Look at what else runs on {nodes} and how its GPUs are joined (nvidia-smi topo -m), or leave it out: "
        )
        found.append(warned(said, remedy + exclude(*each.nodes), *each.nodes, avoid=len(each.nodes) == 1))
    shown = [
        f"{_called(each)} {_rate(each.figures.rate)}, {1e3 * each.figures.latency_s:.1f} ms"
        for each in outcomes
        if each.figures is not None
    ]
    rest = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
    return Check("groups", "; ".join(shown[:6]) + rest or "none has two members", found)


def _broken(outcome: Outcome) -> Finding:
    culprits = outcome.culprits if len(outcome.culprits) < len(outcome.nodes) else ()
    whose = f" on {', '.join(outcome.culprits)}" if outcome.culprits else ""
    if not outcome.tried:
        said = f"{_called(outcome)} was not tried: {outcome.error}{whose}"
        return warned(said, _NOT_TRIED)
    said = f"{_called(outcome)} does not work{whose}: {outcome.error}"
    remedy = "Let connections between the nodes pass, look at NCCL_SOCKET_IFNAME, or "
    return failed(said, remedy + exclude(*(culprits or outcome.nodes)), *culprits)


def _called(outcome: Outcome) -> str:
    if outcome.group.kind == LINK:
        return f"the pair {outcome.group.name}"
    return f"{outcome.group.kind} group {outcome.group.name} ({len(outcome.group.processes)} ranks)"


def _size(outcome: Outcome) -> tuple[str, int, int]:
    return outcome.group.kind, len(outcome.group.processes), len(outcome.nodes)


def _span(figures: Sequence[Figures]) -> str:
    rates = [each.rate for each in figures]
    latency = median(each.latency_s for each in figures)
    return f"{_rate(min(rates))} to {_rate(max(rates))}, {1e3 * latency:.1f} ms (median)"


def _rate(rate: float) -> str:
    return f"{rate / _MB:.0f} MB/s" if rate >= 10 * _MB else f"{rate / _MB:.1f} MB/s"
