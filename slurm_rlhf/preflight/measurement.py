"""Let the agents measure: links between nodes round by round, then the process groups of a rank map."""

from __future__ import annotations

from slurm_rlhf.placement.topology import GPU, Topology
from slurm_rlhf.preflight.groups import Group, Lineup, Outcome, orders_for, outcomes
from slurm_rlhf.preflight.hearing import Hearing

SUSPICIOUS = 0.5
"""Of the fastest link: what is below is measured once more, alone, for a busy moment of a node is no slow link."""
_PARTING_S = 1.0  # that the agents have to report before the time is over


def on_gpus(heard: Hearing, topology: Topology) -> bool:
    """Tell whether ranks compute on GPUs: there are some, and torch is built for them everywhere."""
    return topology.accelerator == GPU and all(each.equipment.get("cuda_build") for each in heard.facts.values())


def measure_links(heard: Hearing, lineup: Lineup, topology: Topology, until: float) -> list[Outcome]:
    """Measure the pairs of `lineup`: over NCCL where ranks use it, which has networks of its own, else over TCP."""
    if on_gpus(heard, topology):
        return measure_groups(heard, lineup, topology, until)
    for number, stage in enumerate(lineup.stages):
        _measure_round(heard, lineup, stage, f"{lineup.name} {number}", until)
    seen = _outcomes(heard, lineup)
    for each in seen:
        if each.figures is not None and each.figures.rate < SUSPICIOUS * max(_rates(seen)):
            _measure_round(heard, lineup, (each.group,), f"{lineup.name} again: {each.group.name}", until)
    again = _outcomes(heard, lineup)
    return [max(pair, key=_rate) for pair in zip(seen, again, strict=True)]


def _outcomes(heard: Hearing, lineup: Lineup) -> list[Outcome]:
    reports = [*heard.reports]
    for group in lineup.groups:  # the other end has seen the same
        reports += [{**said, "seat": group.seats[1]} for said in heard.reports if said.get("group") == group.name]
    return outcomes(lineup, reports)


def _rate(outcome: Outcome) -> float:
    return outcome.figures.rate if outcome.figures is not None else 0.0


def _rates(seen: list[Outcome]) -> list[float]:
    return [_rate(each) for each in seen]


def _measure_round(heard: Hearing, lineup: Lineup, stage: tuple[Group, ...], work: str, until: float) -> None:
    """Let all pairs of a round measure at the same time; nobody else is on their links then."""
    first = []
    for group in stage:
        here, there = (lineup.seats[seat].node for seat in group.seats)
        report = {"seat": group.seats[0], "group": group.name}
        heard.desk.send(here, {"link": [heard.addresses[there], heard.ports[there]], "report": report, "name": work})
        first.append(here)
    heard.listen(until, lambda: set(first) <= heard.done.get(work, set()))


def measure_groups(heard: Hearing, lineup: Lineup, topology: Topology, until: float) -> list[Outcome]:
    """Let a process for each seat of `lineup` go through its groups."""
    if not lineup.groups:
        return []
    first = lineup.seats[0].node
    known = {node.name: node for node in topology.nodes}
    taking_part = dict.fromkeys(seat.node for seat in lineup.seats)
    for node in taking_part:
        place = known.get(node, topology.nodes[0])
        order = {
            **orders_for(lineup, node),
            "node": node,
            "gpus": place.gpus,
            "devices": list(place.devices),
            "accelerator": topology.accelerator,
            "host": heard.addresses[first],
            "port": heard.stores[first],
            "backend": "nccl" if on_gpus(heard, topology) else "gloo",
            "seats_in_all": len(lineup.seats),
            "limit_s": max(heard.left(until) - _PARTING_S, _PARTING_S),
        }
        heard.desk.send(node, order)
    heard.listen(until, lambda: set(taking_part) <= heard.done.get(lineup.name, set()))
    return outcomes(lineup, heard.reports)
