"""Verdicts on the facts that nodes report: each odd one is named, with what to do about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_rlhf.config.architectures import wanted_modules
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.examination import Evidence, Question, judge
from slurm_rlhf.nodes.facts import NodeFacts, Place, Reach
from slurm_rlhf.nodes.needs import Needs, Quota, Space, Wanted
from slurm_rlhf.nodes.report import FAILED, OK, WARNING, Check, Finding, Report, draw
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology
from slurm_rlhf.workers.http import Health

NODES = ("n1", "n2", "n3", "n4")
HERE = {"python": "3.11.7", "torch": "2.13.0", "nccl": "2.29.7"}
NEEDS = Needs(
    "/runs/a",
    Wanted({}),
    dict.fromkeys(NODES, 2),
    space=Space(10_000_000_000, 100, 3, 0),
)
RANKS = place(Topology.uniform(NODES, 2), [RoleSize("actor", 4, 2)])
EQUIPMENT = {"cuda_build": "", "modules": dict.fromkeys(wanted_modules(), False)}


def facts(node: str, **changes: Any) -> NodeFacts:
    """A good node; every other node saw it so."""
    number = int(node[1:])
    good = NodeFacts(
        node=node,
        clock=0.0,
        versions=HERE,
        equipment=EQUIPMENT,
        canary="token",
        run_dir="",
        free_bytes=10**12,
        free_files=10**6,
        shm_free=1 << 30,
        most_files=65536,
        addresses=("127.0.0.1", f"10.1.0.{number}"),
        interface="ib0",
        address=f"10.1.0.{number}",
        subnet="10.1.0.0/24",
        reached=tuple(Reach(other, f"10.1.0.{other[1:]}", "") for other in NODES if other != node),
    )
    return replace(good, **changes)


def examined(odd: str = "n3", needs: Needs = NEEDS, said: str = "", nodes: Any = None, **changes: Any) -> Report:
    """Judge four nodes, one of which is `odd`."""
    there = {node: facts(node) for node in NODES} if nodes is None else nodes
    if odd in there:
        there[odd] = replace(there[odd], **changes)
    asked = Question(NODES, "n1", needs, HERE, RANKS, lambda nodes: RANKS, started="python")
    seen = Evidence(asked, HERE, "token", there, said)
    return Report(NODES, judge(seen), 1.0)


def test_good_nodes_pass() -> None:
    report = examined()
    assert report.verdict == OK, draw(report)
    report.require()
    assert report.notes() == []
    names = {check.name for check in report.checks}
    assert {"names", "interfaces", "clocks", "packages", "run directory", "limits", "GPUs"} <= names
    uncounted = {node: facts(node, free_files=-1) for node in NODES}  # the file system has no inodes
    assert examined(nodes=uncounted).verdict == OK


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (FAILED, {"canary": ""}, "run_dir /runs/a is not shared by all nodes: n3 cannot see what n1, n2, n4", "--run_dir="),
    (FAILED, {"canary": "old"}, "not shared by all nodes: n3", "--exclude=n3"),
    (FAILED, {"run_dir": "Read-only file system"}, "cannot be written on n3: Read-only", "--exclude=n3"),
    (FAILED, {"versions": {**HERE, "torch": "2.12.0"}}, "n3: torch 2.12.0, here 2.13.0", "--exclude=n3"),
    (FAILED, {"versions": {"python": "3.11.7"}}, "n3: torch None, here 2.13.0", "one environment"),
    (FAILED, {"skew_s": 3600.0}, "the clock of n3 is 60 min ahead", "chronyc makestep"),
    (WARNING, {"skew_s": -4.0}, "the clock of n3 is 4.0 s behind", "--exclude=n3"),
    (
        WARNING,
        {"interface": "eth0", "subnet": "192.168.0.0/16"},
        "n3 reaches the conductor by eth0 in 192.168.0.0/16, most by ib0 in 10.1.0.0/24",
        "export NCCL_SOCKET_IFNAME=ib0",
    ),
    (FAILED, {"exported": ("NCCL_SOCKET_IFNAME=ib7, and its interfaces are lo",)}, "n3 has no such interface", "none"),
    (
        FAILED,
        {"shm": "No space left on device", "shm_free": 0},
        "/dev/shm of n3 cannot be used, 0 MiB",
        "ls -l /dev/shm",
    ),
    (FAILED, {"most_files": 128}, "n3: a process may open 128 files", "ulimit -Hn"),
    (WARNING, {"memlock": 64 << 20, "infiniband": True}, "n3: a process may lock 64 MiB", "ulimit -l unlimited"),
    (WARNING, {"unhealthy": ("GPU 2: 7 uncorrected ECC errors",)}, "n3: GPU 2: 7 uncorrected", "--exclude=n3"),
    (
        FAILED,
        {"places": (Place("actor.model_name_or_path", "/models/7b", "Permission denied"),)},
        "actor.model_name_or_path = /models/7b cannot be read on n3: Permission denied",
        "--exclude=n3",
    ),
    (
        WARNING,
        {"free_bytes": 25 * 10**9},
        "has room for 2 checkpoints, and ckpt.max_num = 3 take 30.0 GB",
        "ckpt.max_num",
    ),
    (FAILED, {"free_bytes": 5 * 10**9}, "has room for 5.0 GB, and one checkpoint takes about 10.0 GB", "Free space"),
    (WARNING, {"free_files": 250}, "250 inodes left, and the checkpoints take about 300", "Free space"),
    (FAILED, {"free_files": 50}, "50 inodes left", "Free space"),
]


@pytest.mark.parametrize(("verdict", "changes", "said", "remedy"), CASES, ids=[case[2][:40] for case in CASES])
def test_the_odd_one_out_is_named(verdict: str, changes: dict[str, Any], said: str, remedy: str) -> None:
    report = examined(**changes)
    assert report.verdict == verdict
    (finding,) = report.findings
    assert said in finding.said
    assert remedy in finding.remedy
    assert finding.nodes in (("n3",), ())
    if verdict == FAILED:
        with pytest.raises(PlacementError, match=r"^preflight failed:\n") as caught:
            report.require()
        assert finding.said in str(caught.value)
        assert finding.remedy in str(caught.value)
    else:
        report.require()
        assert said in report.notes()[0]


def test_a_node_without_a_compiler_is_named_where_the_run_wants_gpus() -> None:
    lacking = {"compiler": "no C compiler"}
    assert examined(**lacking).verdict == OK
    on_gpus = examined(needs=replace(NEEDS, wanted=Wanted(dict.fromkeys(NODES, 2))), **lacking)
    (check,) = [check for check in on_gpus.checks if check.name == "compiler"]
    (finding,) = check.findings
    assert (finding.verdict, finding.nodes) == (FAILED, ("n3",))
    assert "n3: no C compiler; on GPUs Triton compiles" in finding.said
    assert "module load gcc" in finding.remedy


def test_a_lock_that_nobody_holds_is_named_once_for_all_nodes() -> None:
    lock = "/home/me/.cache/torch_extensions/py311_cu130/fused_adam/lock"
    nodes = {node: replace(facts(node), locks=(lock,)) for node in NODES}
    report = examined(nodes=nodes, needs=replace(NEEDS, wanted=Wanted(dict.fromkeys(NODES, 2))))
    (check,) = [check for check in report.checks if check.name == "compiler"]
    (finding,) = check.findings
    assert (finding.verdict, finding.nodes) == (WARNING, NODES)
    assert f"{lock} was left by a process" in finding.said
    assert f"rm {lock}" in finding.remedy


@pytest.mark.parametrize(
    ("reach", "said"),
    [
        (Reach("n3", "", "Name or service not known"), "n1, n2, n4 cannot resolve the name n3: Name or service"),
        (Reach("n3", "10.9.0.3", "No route to host"), "cannot reach n3, whose name is 10.9.0.3 there: No route"),
        (Reach("n3", "10.1.0.9", ""), "the name n3 is 10.1.0.9 elsewhere, and n3 has only 127.0.0.1, 10.1.0.3"),
    ],
)
def test_a_name_that_leads_nowhere(reach: Reach, said: str) -> None:
    nodes = {node: facts(node) for node in NODES}
    for node in ("n1", "n2", "n4"):
        others = tuple(reach if each.node == "n3" else each for each in nodes[node].reached)
        nodes[node] = replace(nodes[node], reached=others)
    (finding,) = examined(nodes=nodes).findings
    assert (finding.verdict, finding.nodes) == (FAILED, ("n3",))
    assert said in finding.said
    assert "let n3 resolve to 10.1.0.3 on all nodes" in finding.remedy


def test_a_node_that_does_not_answer_is_named_with_what_srun_says() -> None:
    words = "slurmstepd: error: execve(): /opt/venv/bin/python: No such file or directory"
    nodes = {node: facts(node) for node in ("n1", "n2")}
    (finding,) = examined(nodes=nodes, said=f"\n{words}\n\n").findings
    assert finding.nodes == ("n3", "n4")
    assert finding.said.startswith(f"no answer from n3, n4; the launcher says:\n    {words}")  # Slurm's reason first
    assert finding.remedy.startswith("If that names nothing to mend: python did not run there")
    assert finding.remedy.endswith("leave a broken node out with --exclude=n3,n4")


@pytest.mark.parametrize(
    ("quota", "verdict", "said"),
    [
        (Quota("lfs quota", 5 * 10**9, None), FAILED, "has room for 5.0 GB, and one checkpoint takes about 10.0 GB"),
        (Quota("quota", 20 * 10**9, None), WARNING, "has room for 2 checkpoints, and ckpt.max_num = 3 take 30.0 GB"),
        (Quota("quota", None, 50), FAILED, "has 50 inodes left, and the checkpoints take about 300"),
        (Quota("quota", 10**15, 10**9), OK, ""),
    ],
)
def test_a_quota_that_is_smaller_than_the_disk(quota: Quota, verdict: str, said: str) -> None:
    report = examined(needs=replace(NEEDS, quota=quota))
    assert report.verdict == verdict
    words = [finding.said for check in report.checks for finding in check.findings]
    assert words == ([f"your quota on run_dir /runs/a (by `{quota.by}`) {said}"] if said else [])


def test_a_node_without_a_sandbox_and_one_with_a_weak_one() -> None:
    needs = replace(NEEDS, sandbox="auto")
    there = {node: facts(node, sandbox="bubblewrap") for node in NODES}
    report = examined(needs=needs, nodes=there, odd="")
    assert report.verdict == OK
    assert "bubblewrap: n1, n2, n3" in draw(report)
    weak = examined(needs=needs, nodes=dict(there), sandbox="landlock")
    assert weak.verdict == WARNING
    assert "n3: landlock (files of others cannot be opened" in weak.findings[0].said
    none = examined(needs=needs, nodes=dict(there), sandbox="", no_sandbox="n3 has no such sandbox")
    assert none.bad_nodes() == ("n3",)
    assert "sandbox" not in draw(examined(nodes=there, odd=""))


def test_servers_that_are_away_are_named_with_their_key() -> None:
    there = Health("env.path", "http://a:1", "/p/game.py", "")
    report = examined(needs=replace(NEEDS, servers=(there,)), odd="")
    assert report.verdict == OK
    assert "http://a:1 serves /p/game.py" in draw(report)
    away = Health("reward.remote_url", "http://b:2", "", "ConnectError: refused")
    report = examined(needs=replace(NEEDS, servers=(there, away)), odd="")
    assert report.verdict == WARNING
    assert [one.said for one in report.findings] == [
        "reward.remote_url: http://b:2 is not there: ConnectError: refused"
    ]
    assert report.bad_nodes() == ()


def test_a_bad_node_that_a_spare_stands_in_for() -> None:
    report = replace(examined(canary=""), left_out=("n3",))
    assert report.bad_nodes() == ("n3",)
    report.require()
    assert report.verdict == OK
    assert report.notes() == [note for note in report.notes() if note.startswith("preflight: left out n3, a spare")]
    assert "left out: n3" in draw(report)
    assert report.to_json()["left_out"] == ["n3"]
    (why,) = report.unfit().values()
    assert "is not shared by all nodes: n3 cannot see" in why
    assert why in report.notes()[0]
    assert replace(report, left_out=()).unfit() == {}


def test_a_table_is_drawn_with_its_findings_and_what_is_left_out() -> None:
    some = [Finding(WARNING, (f"n{number}",), f"disk {number} is slow", "mend it") for number in range(8)]
    network = Check(
        "network", "", (Finding(OK, (), "known\nfor long", ""), Finding(FAILED, ("n1",), "gone", ""), *some)
    )
    report = Report(("n1", "n2"), (Check("disk", "fine"), network), 2.04, ("n9",))
    assert draw(report).splitlines() == [
        "preflight of 2 nodes (n1, n2) in 2.0 s: failed",
        "disk     ok       fine",
        "network  failed   known",
        *(
            f"{'':18}{said}"
            for said in ("for long", "gone", *(f"disk {number} is slow. mend it" for number in range(6)))
        ),
        f"{'':18}and 2 more",
        "left out: n9",
    ]
    assert Report(("n1",), (network,), 0.0, ("n1", *(f"n{number}" for number in range(8)))).verdict == OK
