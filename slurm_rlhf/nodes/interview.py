"""Ask the agents of an examination: what they say, and what they measure."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from slurm_rlhf.nodes.agent_steps import AgentServer
from slurm_rlhf.nodes.facts import Introduction, NodeFacts
from slurm_rlhf.nodes.groups import Lineup, Outcome, orders_for, outcomes
from slurm_rlhf.placement.topology import GPU, Topology
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

T = TypeVar("T")
_PAUSE_S = 0.02

SUSPICIOUS = 0.5
"""A link below this share of the fastest one's rate is measured again: its nodes may have been busy for a moment."""


class Interview:
    """Asks the agents of one examination, and holds what they have said so far. Used from one thread."""

    def __init__(self, agents: AgentServer, limit_s: float) -> None:
        self.met: dict[str, Introduction] = {}
        """Node -> where its agent is reached; the agents that have introduced themselves."""
        self.facts: dict[str, NodeFacts] = {}
        self._skews: dict[str, float] = {}
        self._agents = agents
        self._limit_s = limit_s
        self._begun = time.monotonic()

    @property
    def here(self) -> list[str]:
        """Return the nodes whose agents can be called."""
        return [node for node in list(self.met) if not self._agents.residents[node].lost]

    def seconds(self) -> float:
        """Return the seconds since the interview began."""
        return time.monotonic() - self._begun

    def left(self, until: float) -> float:
        """Return the seconds that are left until `until`, a share of the time limit from 0 to 1."""
        return until * self._limit_s - self.seconds()

    def meet(self, nodes: Collection[str], until: float) -> None:
        """Wait for the agents of `nodes`, and let each introduce itself."""
        asked: set[str] = set()

        def all_known() -> bool:
            for node in nodes:
                if node not in asked and node in self._agents.residents:
                    asked.add(node)
                    answer = self._ask(node, "introduce", None, Introduction)
                    answer.add_done_callback(partial(self._take_introduction, node, time.time()))
            return self._agents.over() or set(nodes) <= self.met.keys()

        wait_until(all_known, self.left(until), _PAUSE_S)

    def learn(self, peers: Mapping[str, Mapping[str, int]], until: float) -> None:
        """Collect the facts of the agents; `peers`: node -> {node that its agent tries to reach: port}."""
        calls = {node: self._ask(node, "facts", others, NodeFacts) for node, others in peers.items()}
        for node, facts in self.gather(calls, until).items():
            self.facts[node] = replace(facts, node=node, skew_s=self._skews[node])

    def _ask(self, node: str, method: str, argument: Any, result: Any) -> Future[Any]:
        return self._agents.call(self._agents.residents[node], method, argument, result, max(self.left(1.0), 0.0))

    def gather(self, calls: Mapping[str, Future[T]], until: float) -> dict[str, T]:
        """Return the answers that come before `until`, a share of the time limit."""

        def enough() -> bool:
            return all(call.done() for call in calls.values()) or self._agents.over()

        wait_until(enough, self.left(until), _PAUSE_S, _PAUSE_S)
        done = {node: call for node, call in calls.items() if call.done() and call.exception() is None}
        return {node: call.result() for node, call in done.items()}

    def _take_introduction(self, node: str, asked: float, answer: Future[Introduction]) -> None:
        if answer.exception() is None:
            said = answer.result()
            self._skews[node] = skew(asked, said.clock, time.time())
            self.met[node] = said

    def measure_links(self, lineup: Lineup, topology: Topology, until: float) -> list[Outcome]:
        """Measure the pairs of `lineup`, and once more, one after the other, those that seem slow."""
        seen = self.measure_groups(lineup, topology, until)
        slow = [each.group for each in seen if each.figures and each.figures.rate < SUSPICIOUS * max(map(_rate, seen))]
        alone = replace(lineup, name=f"{lineup.name} again", stages=tuple((group,) for group in slow))
        again = {each.group: each for each in self.measure_groups(alone, topology, until)}
        return [max(each, again.get(each.group, each), key=_rate) for each in seen]

    def measure_groups(self, lineup: Lineup, topology: Topology, until: float) -> list[Outcome]:
        """Let the processes of `lineup` go through their groups."""
        if not lineup.groups:
            return []
        first = lineup.processes[0].node
        known = {node.name: node for node in topology.nodes}
        taking_part = dict.fromkeys(process.node for process in lineup.processes)
        # NCCL only where the run has GPUs and every node has torch with CUDA.
        on_gpus = topology.accelerator == GPU and all(each.equipment.get("cuda_build") for each in self.facts.values())
        calls = {}
        for node in taking_part:
            place = known.get(node, topology.nodes[0])
            order = {
                **orders_for(lineup, node),
                "place": asdict(Topology((replace(place, name=node),), topology.accelerator)),
                "host": self.met[first].address,
                "port": self.met[first].port,
                "backend": "nccl" if on_gpus else "gloo",
                "processes_in_all": len(lineup.processes),
                "limit_s": max(self.left(until) - timeouts.REPORT_S, timeouts.REPORT_S),
            }
            calls[node] = self._ask(node, "groups", order, list[dict[str, Any]])
        return outcomes(lineup, [report for said in self.gather(calls, until).values() for report in said])

    def end(self) -> None:
        """Let the agents end what they have started for measurements; they stay."""
        for node in self.here:
            self._ask(node, "examined", None, None)


def skew(asked: float, clock: float, heard: float) -> float:
    """Return by how many seconds `clock`, read between `asked` and `heard`, is at least ahead; negative: behind."""
    ahead = clock - (asked + heard) / 2
    return math.copysign(max(abs(ahead) - (heard - asked) / 2, 0.0), ahead)


def _rate(outcome: Outcome) -> float:
    return outcome.figures.rate if outcome.figures is not None else 0.0
