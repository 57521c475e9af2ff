"""The table of faults, and what is drawn from it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from campaign.draw import delay_s, draw
from campaign.faults import ANY, BORNE, PHASES, SLURM, all_faults
from campaign.injection import INJECT, function_of
from fault_campaign import main

LOCAL = [fault for fault in all_faults() if fault.needs != "slurm"]


def test_there_are_enough_and_each_has_its_own_name() -> None:
    names = Counter(fault.name for fault in all_faults())
    assert [name for name, count in names.items() if count > 1] == []
    assert len(LOCAL) >= 60


def test_every_role_and_phase_has_a_kill_and_a_stop() -> None:
    known = {(fault.kind, fault.target, fault.phase) for fault in LOCAL}
    targets = ("actor rank 0", "critic rank 0", "reference rank 0", "rollout rank 0", "torchrun of actor", "conductor")
    wanted = {(kind, target, phase) for kind in ("SIGKILL", "SIGSTOP") for target in targets for phase in PHASES}
    assert wanted <= known


def test_who_is_to_be_named_is_a_regular_expression() -> None:
    for fault in all_faults():
        assert re.compile(fault.says.replace("{node}", "x"))
        assert fault.says or fault.does == BORNE


def test_every_fault_of_this_machine_can_be_done() -> None:
    assert {function_of(fault) for fault in LOCAL} == set(INJECT)


@pytest.mark.parametrize("seed", range(5))
def test_sixty_cover_every_kind_target_and_phase(seed: int) -> None:
    drawn = draw(LOCAL, 60, seed)
    assert len({fault.name for fault in drawn}) == 60
    for part in ("kind", "target", "phase"):
        assert {getattr(fault, part) for fault in drawn} == {getattr(fault, part) for fault in LOCAL}


def test_a_seed_draws_the_same_faults_at_the_same_moments() -> None:
    first, again, other = draw(LOCAL, 20, 3), draw(LOCAL, 20, 3), draw(LOCAL, 20, 4)
    assert first == again != other
    assert [delay_s(fault, 3, 1.0) for fault in first] == [delay_s(fault, 3, 1.0) for fault in again]
    assert delay_s(first[0], 3, 1.0) != delay_s(first[0], 4, 1.0)


def test_a_seed_draws_all_faults_of_a_cluster_in_its_own_order() -> None:
    """Among them two at once: an engine dies while a checkpoint is written, a node while another is replaced."""
    first, other = draw(SLURM, len(SLURM), 0), draw(SLURM, len(SLURM), 1)
    assert first != other
    assert {fault.name for fault in first} == {fault.name for fault in other} == {fault.name for fault in SLURM}
    known = {(fault.kind, fault.target, fault.phase) for fault in SLURM if fault.each == 1}
    assert ("SIGKILL", "rollout rank 0", "checkpoint") in known
    assert ("crash, one after the other", "node of actor rank 1, its stand-in", "train") in known
    assert ("clock jump +1 h", "node of actor rank 1", ANY) in known


def test_the_first_and_the_last_rank_of_each_role_are_killed_among_one_and_three_on_a_node() -> None:
    killed = {(fault.each, fault.target) for fault in SLURM if fault.kind == "SIGKILL" and fault.phase == "train"}
    last = {"actor": 2, "critic": 1, "reference": 1, "reward": 1}  # nodes of the role
    wanted = {(each, f"{role} rank {rank}") for each in (1, 3) for role in last for rank in (0, last[role] * each - 1)}
    assert wanted <= killed
    kinds = [{(fault.kind, fault.phase) for fault in SLURM if fault.each == each} for each in (1, 3)]
    assert kinds[0] == kinds[1]


def test_list_draws_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--list", "--faults=7", "--seed=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "(needs " not in line]) == 7
    assert any("needs Slurm: bash tests/run.sh -m campaign" in line for line in lines)
    assert main(["--only=earthquake"]) == 2
    assert "no fault that this machine can run has such a name (--list)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
