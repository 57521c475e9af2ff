"""A real agent on this machine, strangers at the desk, and an agent that does not reach it."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_rlhf.cli import preflight
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.schema import Config
from slurm_rlhf.nodes.accelerators import Wanted
from slurm_rlhf.nodes.desk import Desk, encode, proof
from slurm_rlhf.nodes.examination import Examination, Question, look_here
from slurm_rlhf.nodes.needs import Needs, allocation_problem, earlier_nodes, needs_of
from slurm_rlhf.nodes.node_look import versions
from slurm_rlhf.nodes.report import FAILED, OK, draw
from slurm_rlhf.nodes.starters import AGENT, CommandStarter, here
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.role_sizes import RoleSize
from slurm_rlhf.placement.topology import CPU, Node, Topology

NODE = socket.gethostname().partition(".")[0]
DEAF = (
    "import json, os, runpy\n"
    "orders = json.loads(os.environ['SLURM_RLHF_PREFLIGHT'])\n"
    "orders['port'] = 1\n"
    "os.environ['SLURM_RLHF_PREFLIGHT'] = json.dumps(orders)\n"
    f"runpy.run_module({AGENT!r}, run_name='__main__')\n"
)
"""An agent that looks for the desk where nobody is."""


@pytest.fixture(autouse=True)
def _outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)


def question(run_dir: Path, measure: bool = False) -> Question:
    ranks = place(
        Topology((Node(NODE, 4),), CPU),
        [RoleSize("actor", num_nodes=1, num_gpus_per_node=2), RoleSize("rollout", num_nodes=1, engines=1, tp=2)],
    )
    return Question(
        nodes=(NODE,),
        here=NODE,
        address="127.0.0.1",
        needs=Needs(str(run_dir), Wanted({}), {NODE: 4}),
        versions=versions(),
        ranks=ranks,
        place=lambda nodes: ranks,
        measure=measure,
        started=sys.executable,
    )


def test_an_agent_reports_and_ends(tmp_path: Path) -> None:
    answer = Examination(question(tmp_path), here()).run()
    assert answer.report.verdict == OK, draw(answer.report)
    assert [check.name for check in answer.report.checks][:2] == ["answers", "run directory"]
    assert list(tmp_path.iterdir()) == []  # neither the canary nor anything of the agent


@pytest.mark.slow
def test_the_groups_of_the_rank_map_work_together(tmp_path: Path) -> None:
    """Four processes, of one import of torch: the engine's, the actor's and the sync group."""
    answer = Examination(question(tmp_path, measure=True), here()).run()
    assert answer.report.verdict == OK, draw(answer.report)
    told = answer.report.checks[-1].said
    for name in ("TP group engine 0 (2 ranks)", "ZeRO group actor (2 ranks)", "sync group weight sync (4 ranks)"):
        assert name in told
    assert "MB/s" in told


def test_an_agent_that_does_not_reach_the_conductor(tmp_path: Path) -> None:
    starter = CommandStarter([sys.executable, "-c", DEAF], os.environ)
    asked = question(tmp_path)
    report = Examination(asked, starter).run().report
    assert report.verdict == OK  # one machine: nobody has to reach it
    starter = CommandStarter([sys.executable, "-c", DEAF], os.environ)
    two = Examination(Question(**{**_fields(asked), "nodes": (NODE, "elsewhere")}), starter).run().report
    failed = {check.name: check.findings[0] for check in two.checks if check.verdict == FAILED}
    assert failed["answers"].nodes == ("elsewhere",)
    assert failed["conductor"].nodes == (NODE,)
    assert "Connection refused" in failed["conductor"].said


def _fields(asked: Question) -> dict[str, object]:
    return {name: getattr(asked, name) for name in Question.__dataclass_fields__}


def test_nothing_is_started_for_the_quick_look(tmp_path: Path) -> None:
    begun = time.monotonic()
    report = look_here(question(tmp_path), os.environ)
    assert report.verdict == OK
    assert report.seconds <= time.monotonic() - begun


def test_strangers_get_nowhere() -> None:
    """Garbage, a wrong proof, and a proof that was heard before: refused and counted, the agent is not disturbed."""
    desk = Desk("127.0.0.1", "secret")
    try:
        agent = _connected(desk)
        number = _number(desk, agent)
        right = {"node": "n1", "proof": proof("secret", number, "n1"), "clock": time.time() + 3600.0}
        agent.sendall(encode(right))
        assert _heard(desk) == [("n1", right)]
        assert 3590 < desk.skews["n1"] <= 3600.1
        for line in (b"\x80\x04garbage\n", encode({**right, "proof": "0" * 64}), encode(right), b"[" * 9000):
            stranger = _connected(desk)
            _number(desk, stranger)
            stranger.sendall(line)
            assert _heard(desk) == []
            assert stranger.recv(10) == b""  # hung up
            stranger.close()
        assert desk.refused == 4
        desk.send("n1", {"peers": {}})
        assert json.loads(agent.recv(4096)) == {"peers": {}}
        agent.close()
        assert _heard(desk) == []
        assert desk.nodes == []
    finally:
        desk.close()


def _connected(desk: Desk) -> socket.socket:
    return socket.create_connection((desk.address, desk.port), 10)


def _number(desk: Desk, guest: socket.socket) -> str:
    desk.poll(10.0)
    return str(json.loads(guest.recv(4096))["number"])


def _heard(desk: Desk) -> list[tuple[str, object]]:
    return desk.poll(10.0)


def test_needs_of_a_configuration(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path))
    config.actor.model_name_or_path = str(tmp_path / "none")
    config.data.prompt_dataset = str(tmp_path / "prompts.jsonl")
    needs = needs_of(config, question(tmp_path).ranks, None, "")
    assert needs.space is None  # the size of the model is not known
    assert dict(needs.places) == {
        "actor.model_name_or_path": str(tmp_path / "none"),
        "data.prompt_dataset": str(tmp_path / "prompts.jsonl"),
    }
    assert needs.ranks_on == {NODE: 4}
    assert earlier_nodes(tmp_path) == ()
    (tmp_path / "rank_map.json").write_text(json.dumps(question(tmp_path).ranks.to_json()))
    assert earlier_nodes(tmp_path) == (NODE,)
    (tmp_path / "rank_map.json").write_text("{")
    assert earlier_nodes(tmp_path) == ()


def test_an_allocation_that_shrank_over_a_requeue_is_read_from_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of the job, as it was made, beside what scontrol says now; nothing where it does not answer."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}
    slurm = read_slurm(job)
    assert slurm is not None
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\necho 'JobId=7 JobName=x JobState=RUNNING Restarts=1 NodeList=n[1,3-4] NumNodes=3'\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert allocation_problem(slurm) == "n2 no longer belongs to it and it has n4 as well"
    scontrol.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n")
    assert allocation_problem(slurm) == ""


@pytest.mark.parametrize(
    ("image", "started"), [("", sys.executable), ("/image.sif", "apptainer exec /image.sif python3")]
)
def test_a_question_says_how_python_is_started(monkeypatch: pytest.MonkeyPatch, image: str, started: str) -> None:
    monkeypatch.setattr(preflight, "address_among", lambda nodes, own: "10.0.0.1")
    config, slurm = Config(), SimpleNamespace(job_id=12)
    config.slurm.container = image
    asked = preflight.question(config, None, None, ["n1"], slurm)  # type: ignore[arg-type]
    assert re.sub(" --bind=[^ ]+", "", asked.started) == started
    assert (asked.inside, asked.job, asked.address) == (bool(image), "12", "10.0.0.1")
