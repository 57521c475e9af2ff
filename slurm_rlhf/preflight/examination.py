"""Ask the nodes and judge what they say: start agents, hear their facts, let them run collectives, within a minute."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.launch.probe import MISSING
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.spares import chosen
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.preflight.collect import collect
from slurm_rlhf.preflight.desk import Desk
from slurm_rlhf.preflight.facts import NodeFacts
from slurm_rlhf.preflight.groups import Lineup, Outcome, links, orders_for, outcomes, role_groups
from slurm_rlhf.preflight.needs import Needs
from slurm_rlhf.preflight.network_checks import names
from slurm_rlhf.preflight.orders import Orders
from slurm_rlhf.preflight.report import FAILED, Report
from slurm_rlhf.preflight.starters import Starter
from slurm_rlhf.preflight.verdicts import Evidence, judge

INTRODUCED, FACTS, LINKS, GROUPS = 0.4, 0.6, 0.8, 0.95
"""Parts of the time limit at which the next stage begins, whoever is missing."""
_POLL_S = 0.1
_PEERS = 8  # that a node tries to reach, on either side of it in the list
_CONNECT_S = 3.0


@dataclass(frozen=True, slots=True)
class Question:
    """Say what is to be examined. `place` makes the rank map for some of the nodes; `ranks` is the one for now."""

    nodes: tuple[str, ...]
    here: str
    address: str  # of this process, as the nodes reach it
    needs: Needs
    versions: Mapping[str, str]  # of this process; in a container those of the first node count
    ranks: RankMap
    place: Callable[[Sequence[str]], RankMap]
    spares: int = 0
    measure: bool = True  # links and groups
    inside: bool = False  # the agents run in a container, and this process does not
    job: str = ""
    started: str = ""
    equipment: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of nodes whose agent cannot know it
    limit_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold what was found, and the rank map of the nodes that a run should take."""

    report: Report
    ranks: RankMap


@dataclass(slots=True)
class _Heard:
    """Hold what the agents have sent so far."""

    ports: dict[str, int] = field(default_factory=dict)  # introduced agents
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    reports: list[Mapping[str, Any]] = field(default_factory=list)
    done: dict[str, set[str]] = field(default_factory=dict)  # lineup -> nodes

    def take(self, node: str, message: Any, skew_s: float) -> None:
        """Take a message; what is not one of ours is dropped."""
        if not isinstance(message, dict):
            return
        if isinstance(message.get("port"), int):
            self.ports[node] = message["port"]
        if isinstance(message.get("group"), dict):
            self.reports.append(message["group"])
        if "done" in message:
            self.done.setdefault(str(message["done"]), set()).add(node)
        if "facts" in message:
            try:
                self.facts[node] = replace(NodeFacts.from_json(message["facts"]), node=node, skew_s=skew_s)
            except (TypeError, AttributeError):
                return


class Examination:
    """Examine the nodes of one question, once. Blocks for at most `limit_s`, and a few seconds to end the agents."""

    def __init__(self, question: Question, starter: Starter) -> None:
        self._question = question
        self._starter = starter
        self._heard = _Heard()
        self._begun = time.monotonic()
        self._clock = time.time()

    def run(self) -> Answer:
        """Return what was found. Raises RunError if no agent can be started, ConfigError for a bad run directory."""
        asked = self._question
        secret = secrets.token_hex(32)
        desk = Desk(asked.address, secret)
        try:
            with canary_in(Path(asked.needs.run_dir)) as (canary, token):
                self._starter.start(_orders(asked, secret, desk, canary))
                self._hear_facts(desk)
            evidence = self._evidence(desk, token)
            ranks = asked.ranks
            if asked.measure:
                away = self._cut_off(evidence)
                evidence = replace(evidence, links=self._measure(desk, self._links(away), LINKS))
                ranks = self._placed(evidence)
                evidence = replace(evidence, groups=self._measure(desk, role_groups(ranks, away), GROUPS))
        finally:
            desk.close()
            self._starter.end()
        ranks = self._placed(evidence)
        report = self._report(evidence)
        taken = {node.name for node in ranks.topology.nodes}
        gone = tuple(node for node in report.bad_nodes() if node not in taken)
        return Answer(replace(report, left_out=gone), ranks)

    def _hear_facts(self, desk: Desk) -> None:
        nodes = set(self._question.nodes)
        self._listen(desk, INTRODUCED, lambda: nodes <= {*self._heard.ports, *self._printed()})
        for node in self._heard.ports:
            desk.send(node, {"peers": _peers(node, self._question, self._heard.ports)})
        self._listen(desk, FACTS, lambda: set(self._heard.ports) <= self._heard.facts.keys())
        for node, facts in self._printed().items():
            self._heard.facts.setdefault(node, facts)

    def _listen(self, desk: Desk, until: float, enough: Callable[[], bool]) -> None:
        """Take messages until there are enough, the agents have ended, or this part of the time is over."""
        end = self._begun + until * self._question.limit_s
        while not enough() and time.monotonic() < end:
            for node, message in desk.poll(_POLL_S):
                self._heard.take(node, message, desk.skews.get(node, 0.0))
            if self._starter.over() and not desk.nodes:
                return

    def _printed(self) -> dict[str, NodeFacts]:
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

    def _evidence(self, desk: Desk, token: str) -> Evidence:
        asked = self._question
        known = asked.equipment
        facts = {
            node: replace(each, equipment=known.get(node, each.equipment)) for node, each in self._heard.facts.items()
        }
        mine = dict(asked.versions)
        if asked.inside and facts:
            mine = {**next(iter(facts.values())).versions, "slurm_rlhf": mine.get("slurm_rlhf", MISSING)}
        return Evidence(
            asked.nodes,
            asked.here,
            f"{asked.here} ({desk.address}:{desk.port})",
            asked.needs,
            mine,
            token,
            {node: facts[node] for node in asked.nodes if node in facts},
            asked.job,
            self._starter.said()[1],
            asked.started,
            unmeasured="" if asked.measure else "preflight = quick",
        )

    def _cut_off(self, evidence: Evidence) -> set[str]:
        """Return the nodes that take no part in collectives: silent, or not to be reached."""
        unreached = {node for each in names(evidence.facts).findings if each.verdict == FAILED for node in each.nodes}
        return (set(self._question.nodes) - set(self._heard.ports)) | unreached

    def _links(self, away: Collection[str]) -> Lineup:
        first = {share.node: min(share.gpus) for shares in self._question.ranks.roles.values() for share in shares}
        return links([node for node in self._question.nodes if node not in away], first)

    def _measure(self, desk: Desk, lineup: Lineup, until: float) -> list[Outcome]:
        """Let the seats of `lineup` go through their groups."""
        if not lineup.groups:
            return []
        asked, first = self._question, lineup.seats[0].node
        on_gpus = asked.ranks.topology.accelerator == GPU and all(
            each.equipment.get("cuda_build") for each in self._heard.facts.values()
        )
        left = self._begun + until * asked.limit_s - time.monotonic()
        host = self._addresses()[first]
        taking_part = dict.fromkeys(seat.node for seat in lineup.seats)
        for node in taking_part:
            known = asked.ranks.topology.node(node) if node in self._known() else asked.ranks.topology.nodes[0]
            order = {
                **orders_for(lineup, node),
                "node": node,
                "gpus": known.gpus,
                "devices": list(known.devices),
                "accelerator": asked.ranks.topology.accelerator,
                "host": host,
                "port": self._heard.ports[first],
                "backend": "nccl" if on_gpus else "gloo",
                "seats_in_all": len(lineup.seats),
                "limit_s": max(left - 1.0, 1.0),
            }
            desk.send(node, order)
        self._listen(desk, until, lambda: set(taking_part) <= self._heard.done.get(lineup.name, set()))
        return outcomes(lineup, self._heard.reports)

    def _addresses(self) -> dict[str, str]:
        return {node: facts.address or self._question.address for node, facts in self._heard.facts.items()}

    def _known(self) -> set[str]:
        return {node.name for node in self._question.ranks.topology.nodes}

    def _placed(self, evidence: Evidence) -> RankMap:
        """Return the rank map on good nodes, where there are nodes to spare."""
        asked = self._question
        if not asked.spares:
            return asked.ranks
        return asked.place(chosen(asked.nodes, self._report(evidence).bad_nodes(), asked.spares))

    def _report(self, evidence: Evidence) -> Report:
        return Report(self._question.nodes, judge(evidence), time.monotonic() - self._begun)


def look_here(asked: Question, environ: Mapping[str, str]) -> Report:
    """Examine this machine alone, in this process and without collectives. Blocks for a second or two."""
    begun = time.monotonic()
    with canary_in(Path(asked.needs.run_dir)) as (canary, token):
        orders = Orders("", asked.address, 0, asked.needs.run_dir, str(canary), asked.needs.places, gpus=True)
        facts = collect(orders, asked.here, environ)
    seen = Evidence(
        asked.nodes,
        asked.here,
        asked.here,
        asked.needs,
        asked.versions,
        token,
        {asked.here: facts},
        unmeasured="one machine; `slurm-rlhf preflight` measures",
    )
    return Report(asked.nodes, judge(seen), time.monotonic() - begun)


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


def _orders(asked: Question, secret: str, desk: Desk, canary: Path) -> Orders:
    return Orders(
        secret,
        desk.address,
        desk.port,
        str(Path(asked.needs.run_dir).absolute()),
        str(canary.absolute()),
        asked.needs.places,
        asked.needs.ports_on,
        # Without GPUs the reason is of interest, but nvidia-smi on each node of a run on CPUs is not.
        gpus=bool(asked.needs.wanted.slots),
        groups=asked.measure,
        connect_s=_CONNECT_S,
        limit_s=asked.limit_s,
    )


def _peers(node: str, asked: Question, ports: Mapping[str, int]) -> dict[str, int]:
    """Choose whom a node tries to reach: its neighbours in the list, and the conductor's node."""
    ring = [other for other in asked.nodes if other in ports]
    at = ring.index(node) if node in ring else 0
    near = [ring[(at + step) % len(ring)] for distance in range(1, _PEERS + 1) for step in (distance, -distance)]
    return {other: ports[other] for other in dict.fromkeys([*near, asked.here]) if other != node and other in ports}
