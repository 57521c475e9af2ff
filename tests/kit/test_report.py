"""The acceptance kit around its checks: deadlines, what is left out, the table and the files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import kit
import kit_report
import kit_train
import pytest
from gpu_smi import card, write_smi
from kit import CHECKS, FAILED, PASSED, SKIPPED, Check, Finding, Outcome, Place, perform, unfit
from kit_machine import interfaces, machine
from kit_train import judged
from programs import completed
from training_runs import workspace

from slurm_rlhf.cli.plan import layout_on
from slurm_rlhf.config.check import check_colocation
from slurm_rlhf.config.load import load_config

pytestmark = pytest.mark.slow

RUN_SH = Path(__file__).parents[1] / "run.sh"
OUTCOMES = [
    Outcome("sync nccl", "weights by NCCL", PASSED, "nccl: every byte arrived", 12.34, {"bytes_per_s": 5.0}),
    Outcome("zero 3", "two ranks", FAILED, "AssertionError: parameters 0.5 apart | limit 2e-05", 8.0, log="why\nhere"),
    Outcome("ppo tp 2", "an engine of two", SKIPPED, "needs several GPUs: 2, here are 1; one per TP rank"),
]
MACHINE: dict[str, Any] = {
    "gpus": [{"name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559}] * 2,
    "driver": "580.95.05",
    "cuda_of_driver": "13.0",
    "said": "",
    "versions": {"torch": "2.13.0", "nccl": "2.29.7"},
    "interfaces": ["ib0: up, 200 Gbit/s"],
    "topology": "GPU0 GPU1",
    "kernel": "6.1",
    "cpus": 16,
    "commit": "abc",
}


def check(name: str, deadline_s: float = 60, **limits: int) -> Check:
    return Check(name, "", f"kit_misfits:{name}", deadline_s, **limits)


def test_a_check_that_hangs_or_dies_is_ended_with_all_its_processes_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    place = Place(("0",), rehearse=True, scratch=str(tmp_path / "hang"))
    hung = perform(check("sleeper", deadline_s=1), place)
    assert (hung.verdict, hung.figure) == (FAILED, "hung: ended after its 4 s; the stacks are in the log")
    assert "in sleeper" in hung.log
    for pid in map(int, (tmp_path / "hang" / "pids").read_text().split()):
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    died = perform(check("dying"), Place(("0",), scratch=str(tmp_path / "die")))
    assert (died.verdict, died.figure) == (FAILED, "its process ended with 7")
    failed = perform(check("failing"), Place(("0",), scratch=str(tmp_path / "fail")))
    assert (failed.verdict, failed.figure) == (FAILED, "ValueError: the reason")
    assert "what led to it" in failed.log
    seen = perform(check("seeing"), Place(("3", "4"), scratch=str(tmp_path / "see")))
    assert (seen.verdict, seen.figures) == (PASSED, {"SLURM_JOB_ID": None, "SLURM_RLHF_TEST_GPUS": "3,4"})


def test_what_is_left_out_and_why() -> None:
    alone = Place(("0",))
    assert unfit(check("a"), alone, 600) == ""
    assert unfit(check("a", gpus=2), alone, 600).startswith("needs several GPUs: 2, here are 1")
    assert "sbatch --nodes=2 sbatch/gpu_check.sh" in unfit(check("a", nodes=2), alone, 600)
    assert unfit(check("a"), alone, 10) == "the 10 minutes of the kit were over"
    assert unfit(check("a", nodes=2), Place(("0",), nodes=("a", "b")), 600) == ""
    assert perform(check("a", gpus=2), alone).verdict == SKIPPED


def test_every_check_has_a_function_and_a_deadline_within_the_kits_own() -> None:
    for one in CHECKS:
        module, _, function = one.run.partition(":")
        text = (Path(__file__).parents[1] / "support" / f"{module}.py").read_text()
        assert f"\ndef {function}(place: Place) -> Finding:" in text
        assert kit.LEAST_S < one.deadline_s < kit.BUDGET_S
    assert len({one.name for one in CHECKS}) == len(CHECKS)


def test_the_table_and_the_two_files(tmp_path: Path) -> None:
    text = kit_report.table(OUTCOMES, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.splitlines()[1] == "sync nccl  passed      12.3  nccl: every byte arrived"
    assert "FAILED       8.0  AssertionError:" in text
    assert kit_report.verdict(OUTCOMES) == "FAILED: 1 passed, 1 failed, 1 skipped"
    assert kit_report.verdict(OUTCOMES[:1]) == "PASSED: 1 passed, 0 failed, 0 skipped"
    assert kit_report.verdict(OUTCOMES[2:]) == "NOTHING WAS RUN: 0 passed, 0 failed, 1 skipped"
    report = kit_report.as_json(OUTCOMES, MACHINE, False, 20.3)
    markdown, data = kit_report.write(tmp_path, report)
    assert json.loads(data.read_text()) == report
    page = markdown.read_text()
    assert "| GPUs | 2 x NVIDIA H100 80GB HBM3, 80 GiB |" in page
    assert "| driver | 580.95.05, for CUDA 13.0 |" in page
    assert "| zero 3 | two ranks | FAILED | 8.0 | AssertionError: parameters 0.5 apart \\| limit 2e-05 |" in page
    assert "## Last lines of zero 3\n\n```\nwhy\nhere\n```" in page
    assert "ib0: up, 200 Gbit/s" in page
    assert "REHEARSAL" not in page
    assert kit_report.REHEARSED in kit_report.as_markdown({**report, "rehearsal": True})


def test_the_machine_is_described_without_names_or_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, infiniband = tmp_path / "net", tmp_path / "infiniband"
    for name, state, speed in (("lo", "unknown", ""), ("ib0", "up", "200000"), ("eth0", "down", "-1")):
        (net / name).mkdir(parents=True)
        (net / name / "operstate").write_text(f"{state}\n")
        (net / name / "speed").write_text(f"{speed}\n")
    (infiniband / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    (infiniband / "mlx5_0" / "ports" / "1" / "rate").write_text("200 Gb/sec (4X HDR)\n")
    expected = ["eth0: down", "ib0: up, 200 Gbit/s", "mlx5_0 port 1: 200 Gb/sec (4X HDR)"]
    assert interfaces(net, infiniband) == expected
    write_smi(tmp_path / "bin", [card(0)])
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    found = machine()
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA H100 80GB HBM3"]
    assert found["driver"] == "580.95.05"
    assert {"torch", "vllm", "cuda of torch"} <= set(found["versions"])
    assert kit_report.as_markdown(kit_report.as_json([], found, False, 1.0))


ROW = {"step": 1, "rollout_logprob_diff": 1e-4, "time/step": 1.0, "perf/tokens_per_s": 9.0, "reward": 0.5}
LOG = "weight transfer group 1: {'address': '10.0.0.1', 'backend': 'nccl'}"


@pytest.mark.parametrize(
    ("change", "log", "expected"),
    [
        ({}, LOG, ""),
        ({"rollout_logprob_diff": 1.06}, LOG, "rollout_logprob_diff is 1.06e.00 in bf16, limit 0.06"),
        ({"reward": float("nan")}, LOG, "step 3: not finite: reward"),
        ({}, LOG.replace("nccl", "gloo"), "weights went by gloo, expected nccl"),
        ({}, "", "weights went by nobody knows what, expected nccl"),
    ],
)
def test_a_run_is_judged_by_its_metrics_and_by_how_weights_went(
    change: dict[str, float], log: str, expected: str
) -> None:
    rows = [{**ROW, "step": 1}, {**ROW, "step": 2}, {**ROW, "step": 3, **change}]
    if not expected:
        assert judged(rows, log, "bf16", "nccl")[0].figures["step_s"] == 1.0
        return
    with pytest.raises(AssertionError, match=expected):
        judged(rows, log, "bf16", "nccl")
    with pytest.raises(AssertionError, match="2 steps of 3"):
        judged(rows[:2], log, "bf16", "nccl")


@pytest.mark.parametrize(("there", "used"), [(1, 1), (3, 1), (4, 2), (8, 2)])
def test_roles_that_share_gpus_share_two_where_there_are_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int, used: int
) -> None:
    asked: list[str] = []

    def ppo(place: Place, dtype: str, backend: str, *words: str) -> tuple[Finding, list[dict[str, float]]]:
        asked.extend(words)
        return Finding(backend), [{"perf/sleep_freed_bytes": 2.0**31}]

    monkeypatch.setattr(kit_train, "ppo_run", ppo)
    assert "2.0 GiB freed by sleep" in kit_train.ppo_colocated(Place(tuple(map(str, range(there))))).figure
    config = load_config(workspace(tmp_path), asked)
    check_colocation(config)
    roles = layout_on(config, ["here"], [there]).roles
    assert {name: len(share.ranks) for name, (share,) in roles.items()} == dict.fromkeys(roles, used)
    assert {"actor", "critic", "rollout"} < set(roles)


@pytest.mark.parametrize("words", [("-m", "gpu"), ("-mgpu",), ("-m=gpu",)])
def test_without_a_gpu_the_kit_ends_with_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_smi(tmp_path, said="No devices were found\n")
    done = completed(["bash", str(RUN_SH), *words], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tests: no GPU here (nvidia-smi -L: No devices were found)")
    assert "--rehearse" in line


def test_a_batch_script_in_slurms_spool_finds_the_kit_or_says_how_to_submit(tmp_path: Path) -> None:
    checkout, spool = tmp_path / "checkout", tmp_path / "spool"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "tests" / "run.sh").write_text('printf "%s\\n" "$@"\n')
    spool.mkdir()
    script = shutil.copy(RUN_SH.parents[1] / "sbatch" / "gpu_check.sh", spool / "slurm_script")
    environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(checkout)}
    words = ["bash", str(script), "--rehearse", "-k", "a or b"]
    said = completed(words, check=True, env=environment).stdout
    assert said.splitlines() == ["-m", "gpu", "--rehearse", "-k", "a or b"]
    environment["SLURM_SUBMIT_DIR"] = str(tmp_path)
    lost = completed(words, env=environment)
    stated = f"gpu_check: no checkout around {tmp_path}. Submit from its top: sbatch sbatch/gpu_check.sh\n"
    assert (lost.returncode, lost.stderr) == (2, stated)


def test_the_kit_is_no_part_of_the_ordinary_run() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    kit_file = str(Path(__file__).with_name("test_gpu.py"))
    assert f"{len(CHECKS)} deselected" in completed([*command, kit_file]).stdout
    assert completed([*command, kit_file, "-m", "gpu"]).stdout.count("test_check[") == len(CHECKS)
