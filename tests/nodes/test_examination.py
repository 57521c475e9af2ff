"""A real agent on this machine, and one that does not reach the conductor."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from programs import completed
from waiting import HANG_S, until

from slurm_rlhf.cli import preflight
from slurm_rlhf.config.schema import Config
from slurm_rlhf.nodes import examination, examiner
from slurm_rlhf.nodes.agent_steps import LocalAgents
from slurm_rlhf.nodes.examination import Question, _peers, examine_nodes
from slurm_rlhf.nodes.groups import Figures, Lineup, Outcome, links
from slurm_rlhf.nodes.interview import Interview, skew
from slurm_rlhf.nodes.needs import Needs, Wanted, needs_of
from slurm_rlhf.nodes.node_look import versions
from slurm_rlhf.nodes.report import OK, Check, draw, failed
from slurm_rlhf.nodes.srun import AGENT
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import CPU, Node, RoleSize, Topology

NODE = socket.gethostname().partition(".")[0]
HERE = Topology((Node(NODE, 4),), CPU)
DEAF = (
    "import json, os, runpy\n"
    "orders = json.loads(os.environ['SLURM_RLHF_AGENT'])\n"
    "orders['port'] = 1\n"
    "os.environ['SLURM_RLHF_AGENT'] = json.dumps(orders)\n"
    f"runpy.run_module({AGENT!r}, run_name='__main__')\n"
)
"""An agent that looks for the conductor where nobody is."""


@pytest.fixture(autouse=True)
def _outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)


def question(run_dir: Path, measure: bool = False) -> Question:
    ranks = place(
        HERE, [RoleSize("actor", num_nodes=1, num_gpus_per_node=2), RoleSize("rollout", num_nodes=1, engines=1, tp=2)]
    )
    return Question(
        nodes=(NODE,),
        here=NODE,
        needs=Needs(str(run_dir), Wanted({}), {NODE: 4}),
        versions=versions(),
        ranks=ranks,
        place=lambda nodes: ranks,
        measure=measure,
        started=sys.executable,
    )


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[LocalAgents]:
    with closing(LocalAgents(tmp_path, HERE)) as found:
        yield found


def test_an_agent_reports_and_stays(agents: LocalAgents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = [], Interview._ask
    monkeypatch.setattr(Interview, "_ask", lambda *words: asked.append(words[2]) or ask(*words))
    report, _ = examine_nodes(question(tmp_path), agents)
    assert report.verdict == OK, draw(report)
    assert [check.name for check in report.checks][:2] == ["answers", "run directory"]
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]  # the canary is gone
    assert asked == ["introduce", "facts", "examined"]  # it measured nothing, and ends what it may have started
    (view,) = agents.look({NODE: [os.getpid()], "elsewhere": [1]}, HANG_S)
    assert view.states[os.getpid()]
    assert (agents.unheard(HANG_S), agents.unheard(-1.0)) == (set(), {NODE})
    agents.close()
    assert agents.over()
    assert agents.unheard(-1.0) == set()  # agents that have all ended tell nothing of their nodes


def test_the_groups_of_the_rank_map_work_together(agents: LocalAgents, tmp_path: Path) -> None:
    """Four processes, of one import of torch, which ends with the measurements: engine's, actor's and sync group."""
    report, _ = examine_nodes(question(tmp_path, measure=True), agents)
    assert report.verdict == OK, draw(report)
    stated = report.checks[-1].said
    for name in ("TP group engine 0 (2 ranks)", "ZeRO group actor (2 ranks)", "sync group weight sync (4 ranks)"):
        assert name in stated
    assert "MB/s" in stated
    agent = psutil.Process(agents.residents[NODE].pid)
    until(lambda: not agent.children(), "the end of the process that has imported torch")
    assert agent.is_running()


def test_the_processes_of_a_group_meet_over_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    read, started = io.StringIO(), []

    def start(*_: Any, env: dict[str, str], **__: Any) -> SimpleNamespace:
        started.append(env["NCCL_SOCKET_IFNAME"])
        return SimpleNamespace(stdin=read, stderr=io.StringIO())

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(examiner, "interface_of", lambda address: "eth0")
    monkeypatch.setattr(examiner, "is_loopback", lambda address: False)
    monkeypatch.setattr(examiner, "addresses", lambda: [("eth0", "192.0.2.1"), ("ib0", "192.0.2.2")])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host = examiner.GroupHost(listening)
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
        examiner.GroupHost(listening)
    assert started == ["eth0", "ib0"]  # an export of the user wins
    order = {"place": asdict(HERE), "processes": [], "stages": []}
    assert list(host.run(order, {"GLOO_SOCKET_IFNAME": "ib0"})) == []
    assert json.loads(read.getvalue())["address"] == "192.0.2.2"


BROKEN_PAIR = """
import json, socket
from slurm_rlhf.nodes import group_rank
done = []
def measured(order, store, rank, world):
    done.append(rank)
    if len(done) == 1:
        raise RuntimeError("Connection closed by peer")
    return {"latency_s": 0.1, "there_s": 1.0, "back_s": 1.0, "size": 1}
group_rank._measure = measured
with socket.create_server(("127.0.0.1", 0)) as listening:
    order = {"secret": "s", "limit_s": 60.0, "host": "127.0.0.1", "port": listening.getsockname()[1], "name": "links"}
    order |= {"backend": "gloo", "processes": [[0, 0, {}]], "processes_in_all": 1}
    order["stages"] = [[["a - b", [0]]], [["a - c", [0]]]]
    group_rank.measure(order, listening.fileno(), lambda report: print(json.dumps(report), flush=True))
"""


def test_the_pairs_of_a_node_after_a_broken_one_are_measured() -> None:
    done = completed([sys.executable, "-c", BROKEN_PAIR], check=True)
    stated = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each.get("error") for each in stated if each.get("group") == "a - b"] == [None, "Connection closed by peer"]
    assert [each.get("there_s") for each in stated if each.get("group") == "a - c"] == [None, 1.0]


def test_without_groups_nothing_is_measured(agents: LocalAgents) -> None:
    """Every node may be cut off."""
    talk, topology = Interview(agents, 5.0), Topology.uniform([NODE], 2)
    assert talk.measure_groups(Lineup("groups", (), ()), topology, 1.0) == []
    assert talk.measure_links(Lineup("links", (), ()), topology, 1.0) == []


def test_a_run_that_cannot_start_ends_without_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "judge", lambda seen: (Check("node", "", [failed("it is gone", "")]),))
    talk: Any = None
    found = examination._measured(talk, examination.Evidence(question(tmp_path, measure=True), {}, "", {}))
    assert found.unmeasured == "a run cannot start here anyhow"


@pytest.mark.slow
def test_an_agent_that_does_not_reach_the_conductor_says_so(tmp_path: Path) -> None:
    with closing(LocalAgents(tmp_path, HERE)) as agents:
        agents._nodes._command = [sys.executable, "-c", DEAF]
        report, _ = examine_nodes(question(tmp_path), agents)
    (check,) = report.checks
    assert check.findings[0].nodes == (NODE,)
    assert f"{NODE} cannot reach the conductor at 127.0.0.1:1: Connection refused; it has " in check.findings[0].said


def test_a_pair_that_seems_slow_counts_by_the_better_of_two_measurements() -> None:
    pairs = links(["a", "b", "c", "d"], {})
    took = {"links": [9.0, 8.0, *[1.0] * 4], "links again": [5.0, 20.0]}

    def measured(lineup: Lineup, *_: object) -> list[Outcome]:
        seconds = zip(lineup.groups, took[lineup.name], strict=True)
        return [Outcome(group, (), Figures(0.0, each, each, 1)) for group, each in seconds]

    talk: Any = SimpleNamespace(measure_groups=measured)
    found = Interview.measure_links(talk, pairs, talk, 1.0)
    assert [each.figures and each.figures.there_s for each in found] == [5.0, 8.0, *[1.0] * 4]


def test_a_node_tries_to_reach_eight_neighbours_on_either_side_and_the_conductors_node() -> None:
    asked: Any = SimpleNamespace(nodes=[f"n{number}" for number in range(99)], here="n50")
    met: Any = {node: SimpleNamespace(port=1) for node in asked.nodes}
    assert {*_peers("n0", asked, met)} == {*asked.nodes[1:9], "n50", *asked.nodes[-8:]}


def test_a_clock_is_ahead_by_what_is_certain() -> None:
    assert skew(100.0, 3700.5, 101.0) == 3599.5
    assert skew(100.0, 90.5, 101.0) == -9.5
    assert abs(skew(100.0, 100.9, 101.0)) == 0.0


def test_needs_of_a_configuration(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path))
    config.actor.model_name_or_path = str(tmp_path / "none")
    config.data.prompt_dataset = str(tmp_path / "prompts.jsonl")
    config.train.plugins = [str(tmp_path / "plugin.py")]
    for name in ("prompts.jsonl", "plugin.py"):
        (tmp_path / name).touch()
    needs = needs_of(config, question(tmp_path).ranks, "")
    assert needs.space is None  # the size of the model is not known
    assert dict(needs.places) == {
        "actor.model_name_or_path": str(tmp_path / "none"),
        "data.prompt_dataset": str(tmp_path / "prompts.jsonl"),
        "train.plugins": str(tmp_path / "plugin.py"),
    }
    assert needs.ranks_on == {NODE: 4}


@pytest.mark.parametrize(
    ("image", "started"), [("", sys.executable), ("/image.sif", "apptainer exec /image.sif python3")]
)
def test_a_question_says_how_python_is_started(image: str, started: str) -> None:
    config, slurm = Config(), SimpleNamespace(job_id=12)
    config.slurm.container = image
    asked = preflight.question(config, None, None, ["n1"], slurm)  # type: ignore[arg-type]
    assert re.sub(" --bind=[^ ]+", "", asked.started) == started
    assert asked.inside == bool(image)
