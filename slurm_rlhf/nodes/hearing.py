"""Hear what the agents say, in stages, and let them measure: links round by round, then the groups of a rank map."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slurm_rlhf.nodes.desk import Desk
from slurm_rlhf.nodes.facts import NodeFacts
from slurm_rlhf.nodes.groups import Group, Lineup, Outcome, orders_for, outcomes
from slurm_rlhf.nodes.starters import Starter
from slurm_rlhf.placement.topology import GPU, Topology
from slurm_rlhf.wire import timeouts


class Hearing:
    """Hold what the agents of one examination have said so far. Used from one thread."""

    def __init__(self, desk: Desk, starter: Starter, limit_s: float) -> None:
        self.desk = desk
        self.ports: dict[str, int] = {}
        """Node -> where its agent answers links; the agents that have introduced themselves."""
        self.stores: dict[str, int] = {}
        """Node -> where a store may listen."""
        self.addresses: dict[str, str] = {}
        self.facts: dict[str, NodeFacts] = {}
        self.reports: list[Mapping[str, Any]] = []
        self.done: dict[str, set[str]] = {}
        """Piece of work -> the nodes that are through with it."""
        self._starter = starter
        self._limit_s = limit_s
        self._begun = time.monotonic()
        self._clock = time.time()

    def seconds(self) -> float:
        """Return the time since the begin."""
        return time.monotonic() - self._begun

    def left(self, until: float) -> float:
        """Return the seconds until a part of the time, from 0 to 1, is over."""
        return until * self._limit_s - self.seconds()

    def listen(self, until: float, enough: Callable[[], bool]) -> None:
        """Take messages until there are enough, the agents have ended, or this part of the time is over."""
        while not enough() and self.left(until) > 0:
            for node, message in self.desk.poll(timeouts.POLL_S):
                self._take(node, message)
            if self._starter.over() and not self.desk.nodes:
                return

    def printed(self) -> dict[str, NodeFacts]:
        """Return the facts that agents printed: those that do not reach the desk."""
        found = {}
        now = time.time()
        for line in self._starter.said()[0].splitlines():
            try:
                facts = NodeFacts.from_json(json.loads(line)["facts"])
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a message of the day, a module's greeting
            early, late = facts.clock - self._clock, facts.clock - now
            found[facts.node] = replace(facts, skew_s=min(early, 0.0) + max(late, 0.0))
        return found

    def _take(self, node: str, message: Any) -> None:
        """Take a message; what is not one of ours is dropped."""
        if not isinstance(message, dict):
            return
        if isinstance(message.get("port"), int) and isinstance(message.get("store"), int):
            self.ports[node], self.stores[node] = message["port"], message["store"]
            self.addresses[node] = str(message.get("address"))
        if isinstance(message.get("group"), dict):
            self.reports.append(message["group"])
        if "done" in message:
            self.done.setdefault(str(message["done"]), set()).add(node)
        if "facts" in message:
            try:
                facts = NodeFacts.from_json(message["facts"])
            except (TypeError, AttributeError):
                return
            self.facts[node] = replace(facts, node=node, skew_s=self.desk.skews.get(node, 0.0))


SUSPICIOUS = 0.5
"""Of the fastest link: what is below is measured once more, alone, for a busy moment of a node is no slow link."""


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
        if each.figures is not None and each.figures.rate < SUSPICIOUS * max(map(_rate, seen)):
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
            "limit_s": max(heard.left(until) - timeouts.REPORT_S, timeouts.REPORT_S),
        }
        heard.desk.send(node, order)
    heard.listen(until, lambda: set(taking_part) <= heard.done.get(lineup.name, set()))
    return outcomes(lineup, heard.reports)
