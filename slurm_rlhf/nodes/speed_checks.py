"""Judge how fast nodes and groups are beside their peers: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from slurm_rlhf.nodes.groups import LINK, Figures, Outcome
from slurm_rlhf.nodes.network_checks import exclude
from slurm_rlhf.nodes.report import FAILED, WARNING, Check, Finding

SLOW = 1 / 3
"""Of the median of the peers: what is below is named."""
FAR_BELOW = 1 / 10
"""Of what an interface is made for: with two nodes, what is below is named. One stream of bytes does not fill it."""
_STREAM_MBITS = 10_000  # expected of one TCP stream, however fast the interface
_MB = 1e6


def links(outcomes: Sequence[Outcome], mbits: Mapping[str, int] | None = None) -> Check:
    """Name nodes all of whose links are slow, and single links that are though both their nodes have faster ones.

    Two nodes have no peers: there the figure is what the slower interface is made for, by `mbits` of each node. With
    more, a node is as fast as its fastest link: a slow one makes the links of its partners slow, too.
    """
    found = [_broken(each) for each in outcomes if each.error]
    rates = {each.nodes: each.figures.rate for each in outcomes if each.figures is not None}
    best: dict[str, float] = {}
    for nodes, rate in rates.items():
        for node in nodes:
            best[node] = max(rate, best.get(node, 0.0))
    slow = {node for node, rate in best.items() if len(best) > 2 and rate < SLOW * _median_without(best, node)}
    for node in sorted(slow):
        others = _median_without(best, node)
        said = f"the link of {node} carries {_rate(best[node])}, those of its peers {_rate(others)} (median)"
        remedy = f"Look at its cable, its port and NCCL_SOCKET_IFNAME, or leave it out: {exclude(node)}"
        found.append(Finding(WARNING, (node,), said, remedy, avoid=True))
    usual = median(rates.values()) if rates else 0.0
    for nodes, rate in rates.items():
        if not slow.intersection(nodes) and rate < SLOW * min(usual, *(best[node] for node in nodes)):
            said = f"between {' and '.join(nodes)} pass {_rate(rate)}, though both have links of {_rate(usual)}"
            remedy = f"Something on the way between these two is slow; leave one out: {exclude(nodes[-1])}"
            found.append(Finding(WARNING, (nodes[-1],), said, remedy, avoid=True))
    if len(best) == 2:
        found += _far_below(rates, mbits or {})
    shown = [each.figures for each in outcomes if each.figures is not None]
    return Check("links", f"{len(shown)} pairs: {_span(shown)}" if shown else "one node: there are none", tuple(found))


def _far_below(rates: Mapping[tuple[str, ...], float], mbits: Mapping[str, int]) -> list[Finding]:
    found = []
    for nodes, rate in rates.items():
        made_for = min(_STREAM_MBITS, *(mbits.get(node, 0) for node in nodes)) * _MB / 8
        if rate < FAR_BELOW * made_for:
            said = (
                f"between {' and '.join(nodes)} pass {_rate(rate)}, and their interfaces are made for {_rate(made_for)}"
            )
            remedy = "Look at cables, ports, and at what else uses this network; NCCL_SOCKET_IFNAME names another one"
            found.append(Finding(WARNING, nodes, said, remedy))
    return found


def groups(outcomes: Sequence[Outcome]) -> Check:
    """Name groups that do not work, and those that are slow beside groups of their kind and size."""
    found = [_broken(each) for each in outcomes if each.error]
    for each in outcomes:
        peers = [
            other.figures.rate
            for other in outcomes
            if other is not each and other.figures is not None and _alike(other, each)
        ]
        if each.figures is None or len(peers) < 2 or each.figures.rate >= SLOW * median(peers):
            continue
        said = f"{_called(each)} moves {_rate(each.figures.rate)}, its peers {_rate(median(peers))} (median)"
        nodes = ", ".join(each.nodes)
        remedy = (
            f"Look at what else runs on {nodes} and how its GPUs are joined (nvidia-smi topo -m), or leave it out: "
        )
        found.append(Finding(WARNING, each.nodes, said, remedy + exclude(*each.nodes), avoid=len(each.nodes) == 1))
    shown = [
        f"{_called(each)} {_rate(each.figures.rate)}, {1e3 * each.figures.latency_s:.1f} ms"
        for each in outcomes
        if each.figures is not None
    ]
    rest = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
    return Check("groups", "; ".join(shown[:6]) + rest or "none has two members", tuple(found))


def _broken(outcome: Outcome) -> Finding:
    culprits = outcome.culprits if len(outcome.culprits) < len(outcome.nodes) else ()
    whose = f" on {', '.join(outcome.culprits)}" if outcome.culprits else ""
    if not outcome.tried:
        said = f"{_called(outcome)} was not tried: {outcome.error}{whose}"
        return Finding(WARNING, (), said, "Importing torch is slow there, or an earlier group failed")
    said = f"{_called(outcome)} does not work{whose}: {outcome.error}"
    remedy = "Let connections between the nodes pass, look at NCCL_SOCKET_IFNAME, or "
    return Finding(FAILED, culprits, said, remedy + exclude(*(culprits or outcome.nodes)))


def _called(outcome: Outcome) -> str:
    if outcome.group.kind == LINK:
        return f"the pair {outcome.group.name}"
    return f"{outcome.group.kind} group {outcome.group.name} ({len(outcome.group.seats)} ranks)"


def _alike(one: Outcome, other: Outcome) -> bool:
    same = one.group.kind == other.group.kind and len(one.group.seats) == len(other.group.seats)
    return same and len(one.nodes) == len(other.nodes)


def _median_without(rates: dict[str, float], node: str) -> float:
    return median(rate for other, rate in rates.items() if other != node)


def _span(figures: Sequence[Figures]) -> str:
    rates = [each.rate for each in figures]
    latency = median(each.latency_s for each in figures)
    return f"{_rate(min(rates))} to {_rate(max(rates))}, {1e3 * latency:.1f} ms (median)"


def _rate(rate: float) -> str:
    return f"{rate / _MB:.0f} MB/s" if rate >= 10 * _MB else f"{rate / _MB:.1f} MB/s"
