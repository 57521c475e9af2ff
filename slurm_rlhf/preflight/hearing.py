"""Hear what the agents say, in stages that end when all have spoken or their part of the time is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slurm_rlhf.preflight.desk import Desk
from slurm_rlhf.preflight.facts import NodeFacts
from slurm_rlhf.preflight.starters import Starter

_POLL_S = 0.1


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
            for node, message in self.desk.poll(_POLL_S):
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
