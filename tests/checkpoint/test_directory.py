"""Saving, finding, checking and pruning checkpoints."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from slurm_rlhf.checkpoint import resume
from slurm_rlhf.checkpoint.directory import CheckpointDir, WayBack, _flush
from slurm_rlhf.errors import CheckpointError


def save(checkpoints: CheckpointDir, step: int, note: str = "") -> Path:
    path = checkpoints.begin(step)
    for role in ("actor", "critic"):
        (path / role / "rank_0").mkdir(parents=True)
        (path / role / "rank_0" / "model.bin").write_bytes(f"{role} {step} {note}".encode() * 1000)
    return checkpoints.commit(step, {"step": step, "note": note})


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointDir:
    return CheckpointDir(tmp_path / "run")


def test_a_role_that_the_run_had_not_is_named(checkpoints: CheckpointDir) -> None:
    """As where a run without a critic goes on with an algorithm that has one."""
    path = save(checkpoints, 1)
    assert resume.load_state(path, ["actor", "critic"])["step"] == 1
    with pytest.raises(CheckpointError, match=r"step_000001 holds no judge: the run that wrote it had none, by"):
        resume.load_state(path, ["actor", "judge"])


def test_what_is_saved_comes_back(checkpoints: CheckpointDir) -> None:
    state = {
        "kl": {"coef": 0.1 + 0.2},
        "tiny": 5e-324,
        "seed": 2**127 + 1,
        "done": False,
        "none": None,
        "order": [3, (1, 2)],
        "text": "ü\n\x00",
    }
    path = checkpoints.begin(10)
    assert path == checkpoints.root / "step_000010.tmp"
    assert resume.latest(checkpoints.root) is None
    final = checkpoints.commit(10, {**state, "bad": math.nan})
    assert final == resume.latest(checkpoints.root) == checkpoints.root / "step_000010"
    back = resume.load_state(final)
    assert math.isnan(back.pop("bad"))
    assert back == {**state, "order": [3, [1, 2]]}


def test_state_that_json_does_not_have_is_refused(checkpoints: CheckpointDir) -> None:
    save(checkpoints, 1)
    checkpoints.begin(2)
    with pytest.raises(TypeError, match="bytes is not JSON serializable"):
        checkpoints.commit(2, {"a": [b"x"]})
    assert resume.latest(checkpoints.root) == checkpoints.root / "step_000001"


def test_no_checkpoints_at_all(checkpoints: CheckpointDir) -> None:
    assert resume.latest(checkpoints.root) is None
    assert checkpoints.resolve("auto") is None
    assert checkpoints.resolve("never") is None
    checkpoints.prune(1)
    assert not checkpoints.root.exists()


def test_newest_is_the_last_written_and_not_the_highest_step(checkpoints: CheckpointDir) -> None:
    """Resumed from 10 after 20 had been written: what is written at 15 goes on, 20 is the abandoned branch."""
    for step in (10, 20, 15):
        save(checkpoints, step)
    assert checkpoints.resolve("auto") == checkpoints.root / "step_000015"
    checkpoints.prune(2)
    assert sorted(path.name for path in checkpoints.root.iterdir()) == ["step_000015", "step_000020"]
    checkpoints.prune(1)
    assert [path.name for path in checkpoints.root.iterdir()] == ["step_000015"]


def test_prune_keeps_what_it_is_reported_and_touches_nothing_else(checkpoints: CheckpointDir) -> None:
    for step in range(999_998, 1_000_003):
        save(checkpoints, step)
    (checkpoints.root / "notes.txt").write_text("mine")
    (checkpoints.root / "step_best").mkdir()
    (checkpoints.root / "step_000001").mkdir()
    checkpoints.prune(3)
    left = sorted(path.name for path in checkpoints.root.iterdir())
    assert left == ["notes.txt", "step_000001", "step_1000000", "step_1000001", "step_1000002", "step_best"]


@pytest.mark.parametrize("damaged", [False, True])
def test_same_step_twice_replaces(checkpoints: CheckpointDir, damaged: bool) -> None:
    save(checkpoints, 4)
    first = save(checkpoints, 5, "first")
    if damaged:
        (first / "actor/rank_0/model.bin").unlink()
    final = save(checkpoints, 5, "second")
    assert resume.load_state(final)["note"] == "second"
    assert sorted(path.name for path in checkpoints.root.iterdir()) == ["step_000004", "step_000005"]


def test_leftovers_are_ignored_and_removed_by_the_next_save(checkpoints: CheckpointDir) -> None:
    save(checkpoints, 1)
    (checkpoints.begin(2) / "actor").mkdir()
    assert checkpoints.resolve("auto") == checkpoints.root / "step_000001"
    save(checkpoints, 3)
    assert sorted(path.name for path in checkpoints.root.iterdir()) == ["step_000001", "step_000003"]


# --- damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("actor/rank_0/model.bin", flip, "actor/rank_0/model.bin does not have the contents that were written"),
    ("actor/rank_0/model.bin", lambda p: p.write_bytes(p.read_bytes()[:-1]), "has 7999 bytes instead of 8000"),
    ("critic/rank_0/model.bin", Path.unlink, "critic/rank_0/model.bin is missing"),
    ("critic", shutil.rmtree, "critic/rank_0/model.bin is missing"),
    ("state.json", flip, "state.json does not have the contents"),
    ("manifest.json", Path.unlink, "there is no manifest.json in it"),
    ("manifest.json", lambda p: p.write_bytes(b"\xff\x00"), "manifest.json cannot be read"),
    ("manifest.json", lambda p: p.write_text("[1]"), "manifest.json is not what was written"),
    ("manifest.json", lambda p: p.write_text(p.read_text().replace('l": 2', 'l": 9')), "is not what was written"),
    ("manifest.json", lambda p: p.write_text('{"format": 2}'), "has checkpoint format 2"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_damage_is_found_and_the_usable_checkpoint_named(
    checkpoints: CheckpointDir,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    good, bad = save(checkpoints, 1), save(checkpoints, 2)
    damage(bad / name)
    for use in (resume.load_state, lambda path: checkpoints.resolve(str(path))):
        with pytest.raises(CheckpointError) as caught:
            use(bad)
        assert str(bad) in str(caught.value)
        assert message in str(caught.value)
        assert f"The newest whole checkpoint there is {good}" in str(caught.value)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resolve("auto") == good
    assert message in caplog.text


def test_auto_does_not_start_anew_over_damaged_checkpoints(checkpoints: CheckpointDir) -> None:
    first, second = save(checkpoints, 1), save(checkpoints, 2)
    flip(first / "state.json")
    (second / "manifest.json").unlink()
    assert resume.latest(checkpoints.root) is None
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint in .* is whole:.*step_00000[12].*--resume never"):
        checkpoints.resolve("auto")
    assert checkpoints.resolve("never") is None


def test_directory_that_is_not_a_checkpoint(checkpoints: CheckpointDir, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no such directory\. There is no other checkpoint"):
        checkpoints.resolve(str(tmp_path / "nowhere/step_000001"))
    good = save(checkpoints, 3)
    # The run directory, its checkpoints directory, a step that was pruned: all three name the one to use.
    for path in (tmp_path / "run", checkpoints.root, checkpoints.root / "step_000002"):
        with pytest.raises(CheckpointError, match=f"The newest whole checkpoint there is {good}"):
            checkpoints.resolve(str(path))


def test_checkpoint_can_be_moved_and_given_a_name(checkpoints: CheckpointDir, tmp_path: Path) -> None:
    moved = shutil.move(save(checkpoints, 3), tmp_path / "best")
    (moved / "README").write_text("files of the user's do no harm")
    assert checkpoints.resolve(str(moved)) == moved
    assert resume.load_state(moved)["step"] == 3


def test_large_files_are_checked_by_size_and_both_ends(
    checkpoints: CheckpointDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "WHOLE_LIMIT", 4000)
    monkeypatch.setattr(resume, "ENDS", 1000)
    bad = save(checkpoints, 1)
    record = json.loads((bad / "manifest.json").read_text())["files"]["actor/rank_0/model.bin"]
    assert record["whole"] is False
    model = bad / "actor/rank_0/model.bin"
    intact = model.read_bytes()
    for damaged in (b"\0" + intact[1:], intact[:-1000] + bytes(1000), intact + b"\0"):
        model.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"actor/rank_0/model\.bin"):
            resume.load_state(bad)
    model.write_bytes(intact)
    assert resume.load_state(bad)["step"] == 1


# --- the disk


def test_full_disk_names_the_checkpoint_that_is_left(checkpoints: CheckpointDir) -> None:
    good = save(checkpoints, 1)
    (checkpoints.begin(2) / "state.json").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=f"checkpoint 2 could not be written.*No space left.*{good}"):
        checkpoints.commit(2, {"step": 2})
    assert resume.latest(checkpoints.root) == good


def test_save_whose_directory_was_taken_away(checkpoints: CheckpointDir) -> None:
    good = save(checkpoints, 1)
    shutil.rmtree(checkpoints.begin(2))
    with pytest.raises(CheckpointError, match=r"has vanished.*own"):
        checkpoints.commit(2, {})
    assert resume.latest(checkpoints.root) == good


def test_the_way_back_passes_over_what_is_damaged_and_what_another_start_has_left(checkpoints: CheckpointDir) -> None:
    """The newest of its own, the one before where that is damaged, and else the one that the run came from."""
    first = save(checkpoints, 4)
    save(checkpoints, 8)  # abandoned: the user has resumed from step 4
    back, stated = WayBack.of(checkpoints, first), list[str]()
    assert back.find(stated.append) == first
    own, newest = save(checkpoints, 6), save(checkpoints, 7)
    stated.clear()
    assert (back.find(stated.append), stated) == (newest, [])
    (newest / "actor" / "rank_0" / "model.bin").write_bytes(b"x")
    assert back.find(stated.append) == own
    (warning,) = stated
    assert warning.startswith("warning: ")
    assert "step_000007 is damaged: actor/rank_0/model.bin has 1 bytes instead of" in warning
    assert warning.endswith("the run goes back to step_000006, which is whole")
    assert WayBack.of(CheckpointDir(checkpoints.root.parent / "other"), None).find(stated.append) is None


@pytest.mark.parametrize(
    ("code", "directory", "refused"),
    [(errno.ENOSPC, False, True), (errno.EIO, True, True), (errno.EINVAL, False, True), (errno.EINVAL, True, False)],
)
def test_what_cannot_be_forced_to_disk_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, directory: bool, refused: bool
) -> None:
    """But for directories of file systems that know no fsync of them."""

    def refuse(descriptor: int) -> None:
        raise OSError(code, "refused")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="refused") if refused else nullcontext():
        _flush(tmp_path if directory else tmp_path / "file")


def test_a_file_that_cannot_be_read_is_a_difference_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    record = resume.FileRecord(1, "0" * 64, True)
    assert resume._difference(tmp_path / "file" / "below", record).startswith("cannot be read (")
    assert resume._difference(tmp_path / "nothing", record) == "is missing"
    assert resume._difference(tmp_path / "file", record) == "does not have the contents that were written"
