"""Preflight on a real Slurm: defects of nodes are named with their remedies, and a run starts without a bad node."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import BASE, COMMAND, ENDLESS, OVER, PLACES, SMALL, Cluster, said
from training_runs import saved, workspace
from waiting import HANG_S

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.checkpoint.resume import latest, load_state

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NOT_QUICK = [word for word in PLACES if not word.startswith("--preflight")]
FOUR = ["--nodes=4", "--ntasks-per-node=1", "--gres=gpu:2", "--cpus-per-task=4", "--mem=4000"]
SCRIPT = """#!/bin/bash
export PYTHONPATH=/tmp/site${{PYTHONPATH:+:$PYTHONPATH}}
{command} preflight {config} --run_dir={run_dir} --json {words}
echo "status $?"
"""


@pytest.fixture(scope="module")
def config(slurm: Cluster) -> Path:
    return workspace(slurm.shared / "work")


def preflight(slurm: Cluster, config: Path, run_dir: Path) -> tuple[dict[str, Any], int]:
    """One preflight of four nodes: its report and its exit code."""
    script = run_dir.with_suffix(".sh")
    words = " ".join(NOT_QUICK)
    script.write_text(SCRIPT.format(command=COMMAND, config=config, run_dir=run_dir, words=words))
    job = slurm.sbatch(*FOUR, f"--output={run_dir}.log", str(script))
    slurm.wait_over(job)
    printed = said(run_dir)
    ended = re.search(r"^status (\d+)$", printed, re.MULTILINE)
    report = next((line for line in printed.splitlines() if line.startswith('{"verdict"')), None)
    assert ended is not None, printed
    assert report is not None, printed
    return json.loads(report), int(ended[1])


def findings(report: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return next(each["findings"] for each in report["checks"] if each["name"] == check)


def inside(slurm: Cluster, node: str, command: str) -> None:
    slurm.cluster("exec", node, "bash", "-c", command)


@contextmanager
def links(rates: dict[str, str]) -> Iterator[None]:
    """Links of nodes at a rate, in both directions."""
    ends = {node: (["dev", f"sr{int(node[3:])}-a"], ["-n", f"srlhf-{node}", "dev", "eth0"]) for node in rates}
    shape = ["burst", "64kb", "latency", "50ms"]
    try:
        for node, rate in rates.items():
            for outer in ends[node]:
                tc(outer, "add", "root", "tbf", "rate", rate, *shape)
        yield
    finally:
        for both in ends.values():
            for outer in both:
                tc(outer, "del", "root", check=False)


def tc(end: Sequence[str], verb: str, *words: str, check: bool = True) -> None:
    *space, dev, name = end
    subprocess.run(["tc", *space, "qdisc", verb, dev, name, *words], check=check, capture_output=True, timeout=HANG_S)


def test_each_defect_is_named_with_its_remedy(slurm: Cluster, config: Path) -> None:
    """Other packages, a clock an hour off, no run directory, a full /dev/shm, a slow link: in one look."""
    run_dir = slurm.shared / "runs" / "defects"
    run_dir.parent.mkdir()
    other = "/tmp/site/numpy-1.0.0.dist-info"
    metadata = "Metadata-Version: 2.1\\nName: numpy\\nVersion: 1.0.0\\n"
    inside(slurm, "gpu002", f"mkdir -p {other} && printf '{metadata}' >{other}/METADATA")
    late = "import time\\n_time = time.time\\ntime.time = lambda: _time() + 3600\\n"
    inside(slurm, "gpu003", f"mkdir -p /tmp/site && printf '{late}' >/tmp/site/sitecustomize.py")
    inside(slurm, "gpu003", f"mount -t tmpfs -o size=1m tmpfs {run_dir.parent}")
    inside(slurm, "gpu004", "mount -t tmpfs -o size=64k tmpfs /dev/shm; head -c 64k /dev/zero >/dev/shm/left; true")
    try:
        with links({"gpu001": "200mbit", "gpu002": "200mbit", "gpu003": "200mbit", "gpu004": "20mbit"}):
            report, code = preflight(slurm, config, run_dir)
    finally:
        inside(slurm, "gpu002", "rm -r /tmp/site")
        inside(slurm, "gpu003", f"rm -r /tmp/site; umount {run_dir.parent}")
        inside(slurm, "gpu004", "umount /dev/shm")
    assert (report["verdict"], code) == ("failed", 2)
    expected = {
        "packages": ("gpu002", r"gpu002: numpy 1.0.0, here 2", "--exclude=gpu002"),
        "clocks": ("gpu003", r"the clock of gpu003 is 60 min ahead", "chronyc makestep"),
        "run directory": ("gpu003", r"not shared by all nodes: gpu003 cannot see", "--run_dir=/SHARED"),
        "shared memory": ("gpu004", r"/dev/shm of gpu004 cannot be used, 0 MiB are free: No space", "ls -l /dev/shm"),
        "links": ("gpu004", r"the link of gpu004 carries [\d.]+ MB/s, those of its peers [\d.]+", "--exclude=gpu004"),
    }
    for check, (node, words, remedy) in expected.items():
        (finding,) = findings(report, check)
        assert finding["nodes"] == [node], finding
        assert re.search(words, finding["said"]), finding
        assert remedy in finding["remedy"], finding
    others = [each["name"] for each in report["checks"] if each["findings"] and each["name"] not in expected]
    assert others in ([], ["GPUs"])  # these nodes have a CPU build, and GPUs that are none
    groups = next(each["said"] for each in report["checks"] if each["name"] == "groups")
    assert "ZeRO group actor (2 ranks)" in groups
    assert "sync group weight sync (4 ranks)" in groups


def test_a_name_that_leads_into_an_unreachable_subnet(slurm: Cluster, config: Path) -> None:
    run_dir = slurm.shared / "runs" / "names"
    run_dir.mkdir(parents=True, exist_ok=True)
    hosts = BASE / "etc" / "hosts"
    good = hosts.read_text()
    inside(slurm, "gpu003", "ip addr add 10.99.0.103/24 dev ib0")
    try:
        hosts.write_text(re.sub(r"^\S+ gpu003$", "10.99.0.103 gpu003", good, flags=re.MULTILINE))  # Slurm has NodeAddr
        report, code = preflight(slurm, config, run_dir)
    finally:
        hosts.write_text(good)
        inside(slurm, "gpu003", "ip addr del 10.99.0.103/24 dev ib0")
    assert (report["verdict"], code) == ("failed", 2)
    (finding,) = findings(report, "names")
    assert finding["nodes"] == ["gpu003"]
    said = r"gpu001, gpu002, gpu004 cannot reach gpu003, whose name is 10.99.0.103 there: Network is unreachable"
    assert re.search(said, finding["said"]), finding
    assert "(eth0): let gpu003 resolve to 10.78.0.103 on all nodes, or --exclude=gpu003" in finding["remedy"]


def test_a_run_starts_without_the_bad_node_and_scancel_ends_it(slurm: Cluster, config: Path) -> None:
    """`scancel` leaves the last checkpoint usable, no orphan, and the allocation released."""
    run_dir = slurm.shared / "runs" / "spare"
    run_dir.parent.mkdir(exist_ok=True)
    inside(slurm, "gpu002", f"mount -t tmpfs -o size=1m tmpfs {run_dir.parent}")
    script = run_dir.with_suffix(".sh")
    words = " ".join([*NOT_QUICK, *SMALL, *ENDLESS, "--cluster.spares=1", "--ckpt.save_steps=1"])
    script.write_text(f"#!/bin/bash\nexec {COMMAND} train {config} --run_dir={run_dir} {words}\n")
    try:
        options = ["--nodes=3", "--nodelist=gpu[001-003]", *FOUR[1:], f"--output={run_dir}.log"]
        job = slurm.sbatch(*options, str(script))
        slurm.wait_until(lambda: len(saved(run_dir)) >= 1 or slurm.job(job)["JobState"] in OVER, "a checkpoint")
        slurm.run("scancel", str(job))
        state, _ = slurm.wait_over(job)
    finally:
        inside(slurm, "gpu002", f"umount {run_dir.parent}")
    assert state == "CANCELLED", said(run_dir)
    assert "preflight: left out gpu002, a spare takes over: run_dir" in said(run_dir)
    ranks = json.loads((run_dir / "rank_map.json").read_text())
    assert [node["name"] for node in ranks["nodes"]] == ["gpu001", "gpu003"]
    newest = latest(CheckpointDir(run_dir).root)
    assert newest is not None
    assert load_state(newest)["run"]["step"] >= 1
    slurm.wait_until(lambda: not slurm.left(run_dir, *slurm.names), "end of its processes")
    assert not slurm.run("squeue", "-h").strip()
