"""Faults of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign.files import DISKS, damage, disks_here, fill, free, remove_all

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.errors import RunError


def whole(root: Path) -> CheckpointDir:
    checkpoints = CheckpointDir(root)
    for step in (2, 4):
        (checkpoints.begin(step) / "actor").mkdir()
        (checkpoints.root / f"step_{step:06d}.tmp" / "actor" / "weights").write_bytes(bytes(1000))
        checkpoints.commit(step, {"step": step})
    return checkpoints


@pytest.mark.parametrize("how", ["truncated", "flipped bit", "without manifest", "without actor"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, how: str) -> None:
    checkpoints = whole(tmp_path)
    assert checkpoints.latest() == checkpoints.of(4)
    assert damage(checkpoints.root, how) == checkpoints.of(4)
    assert checkpoints.latest() == checkpoints.of(2)


def test_the_only_checkpoint_is_not_damaged(tmp_path: Path) -> None:
    checkpoints = CheckpointDir(tmp_path)
    checkpoints.begin(2)
    checkpoints.commit(2, {})
    with pytest.raises(RunError, match="has 1 checkpoints, and two are needed"):
        damage(checkpoints.root, "truncated")
    assert checkpoints.latest() == checkpoints.of(2)


@pytest.mark.parametrize("need, told", [("root", "No space left"), ("quota", "Disk quota exceeded")])
def test_a_disk_and_a_quota_can_be_used_up_and_freed(tmp_path: Path, need: str, told: str) -> None:
    if need not in disks_here():
        pytest.skip(f"needs mounts: no file system for {need!r} can be mounted here")
    with DISKS[need](tmp_path / "disk") as disk:
        fill(disk)
        with pytest.raises(OSError, match=told):
            (disk / "more").write_bytes(bytes(1 << 16))
        free(disk)
        (disk / "more").write_bytes(bytes(1 << 16))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_goes_away_with_all_that_is_in_it(tmp_path: Path) -> None:
    whole(tmp_path / "run")
    remove_all(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
