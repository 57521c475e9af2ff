"""Ask the nodes and judge what they say: start agents, hear their facts, let them run collectives, within a minute."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slurm_rlhf.nodes import network_checks, node_checks
from slurm_rlhf.nodes.agent_server import AgentServer
from slurm_rlhf.nodes.facts import Introduction, NodeFacts, Orders
from slurm_rlhf.nodes.groups import Lineup, Outcome, links, orders_for, outcomes, role_groups
from slurm_rlhf.nodes.needs import Needs
from slurm_rlhf.nodes.network_checks import names
from slurm_rlhf.nodes.node_look import MISSING
from slurm_rlhf.nodes.report import FAILED, Check, Report
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.replacement import chosen
from slurm_rlhf.placement.topology import GPU, Topology
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

if TYPE_CHECKING:
    from slurm_rlhf.nodes.agent_server import AgentServer

T = TypeVar("T")
_PAUSE_S = 0.02

SUSPICIOUS = 0.5
"""Share of the fastest link's rate: what is below is measured again, as a busy moment of a node is no slow link."""


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
        """Return the time since the begin."""
        return time.monotonic() - self._begun

    def left(self, until: float) -> float:
        """Return the seconds until a part of the time, from 0 to 1, is over."""
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
        """Collect the facts of the agents; each tries to reach its `peers`, and the port of each."""
        calls = {node: self._ask(node, "facts", others, NodeFacts) for node, others in peers.items()}
        for node, facts in self.gather(calls, until).items():
            self.facts[node] = replace(facts, node=node, skew_s=self._skews[node])

    def _ask(self, node: str, method: str, argument: Any, result: Any) -> Future[Any]:
        return self._agents.call(self._agents.residents[node], method, argument, result, max(self.left(1.0), 0.0))

    def gather(self, calls: Mapping[str, Future[T]], until: float) -> dict[str, T]:
        """Return the answers that come before this part of the time is over."""

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

    def _on_gpus(self, topology: Topology) -> bool:
        """Tell whether ranks compute on GPUs: there are some, and torch is built for them everywhere."""
        return topology.accelerator == GPU and all(each.equipment.get("cuda_build") for each in self.facts.values())

    def measure_links(self, lineup: Lineup, topology: Topology, until: float) -> list[Outcome]:
        """Measure the pairs of `lineup`, and once more, one after the other, those that seem slow."""
        seen = self.measure_groups(lineup, topology, until)
        slow = [each.group for each in seen if each.figures and each.figures.rate < SUSPICIOUS * max(map(_rate, seen))]
        alone = replace(lineup, name=f"{lineup.name} again", stages=tuple((group,) for group in slow))
        again = {each.group: each for each in self.measure_groups(alone, topology, until)}
        return [max(each, again.get(each.group, each), key=_rate) for each in seen]

    def measure_groups(self, lineup: Lineup, topology: Topology, until: float) -> list[Outcome]:
        """Let a process for each seat of `lineup` go through its groups."""
        if not lineup.groups:
            return []
        first = lineup.seats[0].node
        known = {node.name: node for node in topology.nodes}
        taking_part = dict.fromkeys(seat.node for seat in lineup.seats)
        calls = {}
        for node in taking_part:
            place = known.get(node, topology.nodes[0])
            order = {
                **orders_for(lineup, node),
                "place": asdict(Topology((replace(place, name=node),), topology.accelerator)),
                "host": self.met[first].address,
                "port": self.met[first].port,
                "backend": "nccl" if self._on_gpus(topology) else "gloo",
                "seats_in_all": len(lineup.seats),
                "limit_s": max(self.left(until) - timeouts.REPORT_S, timeouts.REPORT_S),
            }
            calls[node] = self._ask(node, "groups", order, list[dict[str, Any]])
        return outcomes(lineup, [report for said in self.gather(calls, until).values() for report in said])

    def end(self) -> None:
        """Let the agents end what they have started for measurements; they stay."""
        for node in self.here:
            self._ask(node, "examined", None, None)


def skew(asked: float, clock: float, heard: float) -> float:
    """Return the seconds by which a clock is ahead that was read between two moments, as far as that is certain."""
    ahead = clock - (asked + heard) / 2
    return math.copysign(max(abs(ahead) - (heard - asked) / 2, 0.0), ahead)


def _rate(outcome: Outcome) -> float:
    return outcome.figures.rate if outcome.figures is not None else 0.0


INTRODUCED, FACTS, LINKS, GROUPS = 0.35, 0.45, 0.75, 0.95
"""Parts of the time limit at which the next stage begins, whoever is missing."""
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

    talk = Interview(agents, asked.limit_s)
    with canary_in(Path(asked.needs.run_dir)) as (canary, token):
        agents.begin(_orders(asked, agents, canary))
        talk.meet(asked.nodes, INTRODUCED)
        talk.learn({node: _peers(node, asked, talk.met) for node in list(talk.met)}, FACTS)
    seen = _measured(talk, _evidence(asked, agents, talk, token))
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
    away = (set(asked.nodes) - set(talk.met)) | unreached | set(asked.ranks.topology.workers)  # which need no GPU
    slots = {share.node: min(share.gpus) for shares in asked.ranks.roles.values() for share in shares}
    pairs = links([node for node in asked.nodes if node not in away], slots)
    seen = replace(seen, links=talk.measure_links(pairs, asked.ranks.topology, LINKS))
    ranks = _placed(seen)
    away |= {node for node in asked.nodes if node not in talk.here}
    return replace(seen, groups=talk.measure_groups(role_groups(ranks, away), ranks.topology, GROUPS))


def _evidence(asked: Question, agents: AgentServer, talk: Interview, token: str) -> Evidence:
    facts = {
        node: replace(talk.facts[node], equipment=asked.equipment.get(node, talk.facts[node].equipment))
        for node in asked.nodes
        if node in talk.facts
    }
    mine = dict(asked.versions)
    if asked.inside and facts:
        mine = {**next(iter(facts.values())).versions, "slurm_rlhf": mine.get("slurm_rlhf", MISSING)}
    unmeasured = "" if asked.measure else "preflight = quick"
    return Evidence(asked, mine, token, facts, agents.said(), unmeasured=unmeasured)


def _placed(seen: Evidence) -> RankMap:
    """Return the rank map on good nodes, where there are nodes to spare."""
    asked = seen.asked
    if not asked.spares:
        return asked.ranks
    report = Report(asked.nodes, judge(seen), 0.0)
    nodes = [node for node in asked.nodes if node not in asked.ranks.topology.workers]
    return asked.place(chosen(nodes, report.bad_nodes(), report.failed_nodes(), asked.spares))


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
    said: str = ""  # words of the launcher
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
