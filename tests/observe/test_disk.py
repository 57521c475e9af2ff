"""A disk that refuses: which file system, how much is free and needed, or that a directory has vanished."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_disk import small_disk

from slurm_rlhf import run_directory
from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.cli.main import guarded
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CheckpointError, DiskError, RemoteError
from slurm_rlhf.observe.run_status import Summary
from slurm_rlhf.run import conductor
from slurm_rlhf.run_directory import MIB, RunDirectory, make_run_directory, refusal, remedy, run_directory_kept

FULL, QUOTA = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded")
SHORT_WRITE = RemoteError("save failed on actor 0 on n1: RuntimeError: [enforce fail at inline_container.cc:672] .")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Make statvfs answer that 3 MiB and 10 inodes are free."""
    answer = SimpleNamespace(f_bavail=768, f_frsize=4096, f_files=1000, f_favail=10)
    monkeypatch.setattr(run_directory.os, "statvfs", lambda path: answer)
    monkeypatch.setattr(run_directory, "mount_of", lambda path: ("", Path("/scratch"), "lustre"))
    return answer


def test_a_full_disk_is_reported_with_what_is_free_and_needed(tmp_path: Path, free: SimpleNamespace) -> None:
    said = refusal(FULL, tmp_path, 412 * MIB)
    assert said == "No space left on device: the file system /scratch (lustre) has 3.0 MiB free, and 412 MiB are needed"
    free.f_favail = 0
    assert refusal(FULL, tmp_path).endswith("3.0 MiB free (no inode is left: it holds too many files)")


def test_a_quota_is_not_a_full_disk(tmp_path: Path, free: SimpleNamespace) -> None:
    free.f_bavail = 1 << 28
    for error in (QUOTA, RemoteError("save failed on actor 0: OSError: [Errno 122] Disk quota exceeded")):
        said = refusal(error, tmp_path)
        assert "has 1048576 MiB free, but your quota on it is used up: `quota -s`, or `lfs quota -h -u $USER /s" in said


def test_a_limit_of_the_process_is_no_full_disk(tmp_path: Path, free: SimpleNamespace) -> None:
    for error in (
        OSError(errno.EFBIG, "File too large"),
        RemoteError("save failed on actor 0: [Errno 27] File too large"),
    ):
        assert refusal(error, tmp_path).endswith("this process may write no larger file: raise `ulimit -f`")


def test_an_error_of_a_role_counts_where_little_is_free(tmp_path: Path, free: SimpleNamespace) -> None:
    assert "/scratch (lustre) has 3.0 MiB free" in refusal(SHORT_WRITE, tmp_path)
    free.f_bavail = 1 << 28  # another disk of the role was full
    assert refusal(SHORT_WRITE, tmp_path) == ""
    assert refusal(OSError(errno.EACCES, "Permission denied"), tmp_path) == ""
    free.f_flag = os.ST_RDONLY
    for error in (OSError(errno.EROFS, "Read-only file system"), RemoteError("save: [Errno 30] Read-only file system")):
        assert refusal(error, tmp_path).endswith("is mounted for reading only")
        with pytest.raises(
            DiskError, match=r"only\. Have it mounted for writing again, or set run_dir to another disk"
        ):
            with run_directory_kept(tmp_path):
                raise error
    assert remedy(OSError(errno.EFBIG, "File too large"), tmp_path) == "Raise that limit"
    assert remedy(OSError(errno.EIO, "Input/output error"), tmp_path) == "Set run_dir to another disk"
    free.f_flag = 0  # another disk of the role was read-only
    assert refusal(RemoteError("save: [Errno 30] Read-only file system"), tmp_path) == ""


def checkpoint(directory: CheckpointDir, step: int) -> Path:
    (directory.begin(step) / "actor").write_bytes(bytes(3 * MIB))
    return directory.commit(step, {"step": step})


def test_a_checkpoint_that_does_not_fit_says_what_it_needs_and_which_key_keeps_fewer(
    tmp_path: Path, free: SimpleNamespace
) -> None:
    directory = CheckpointDir(tmp_path)
    good = checkpoint(directory, 1)
    for error in (FULL, SHORT_WRITE):
        with pytest.raises(CheckpointError) as caught, directory.explained(2):
            raise error
        said = str(caught.value)
        assert said.startswith(f"checkpoint 2 could not be written in {tmp_path}/checkpoints: ")
        assert "/scratch (lustre) has 3.0 MiB free, and 3.0 MiB are needed" in said
        assert f"The newest whole checkpoint is {good}" in said
        assert "keep fewer checkpoints (ckpt.max_num; 1 are there)" in said
    with pytest.raises(RemoteError, match="out of memory"), directory.explained(2):
        raise RemoteError("out of memory")


def test_the_first_checkpoint_says_how_far_it_came(tmp_path: Path, free: SimpleNamespace) -> None:
    directory = CheckpointDir(tmp_path)
    (directory.begin(1) / "actor").write_bytes(bytes(2 * MIB))
    with pytest.raises(CheckpointError, match=r"3\.0 MiB free; 2\.0 MiB were written before that\. There is no"):
        with directory.explained(1):
            raise FULL


def test_a_run_directory_that_is_gone_is_reported(tmp_path: Path) -> None:
    directory = CheckpointDir(tmp_path / "run")
    directory.begin(1)
    shutil.rmtree(tmp_path / "run")
    gone = rf"checkpoint 1 could not be written: run_dir {tmp_path}/run has vanished: it was removed or renamed"
    with pytest.raises(CheckpointError, match=gone) as stated:
        directory.commit(1, {})
    assert "Free space" not in str(stated.value)
    with pytest.raises(DiskError, match=rf"run_dir {tmp_path}/run has vanished"), run_directory_kept(tmp_path / "run"):
        (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(FileNotFoundError), run_directory_kept(tmp_path / "run"):
        (tmp_path / "elsewhere" / "file").read_text()
    with pytest.raises(RemoteError, match="of its own"), run_directory_kept(tmp_path):
        raise RemoteError("of its own")


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk(tmp_path / "small", "256k") as disk:
        yield disk


@pytest.mark.parametrize("what", ["vanishes", "is full", "is read-only"])
def test_a_run_whose_directory_refuses_ends_with_one_error(
    tmp_path: Path, full_soon: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Neither the log nor the summary, which cannot be written any more, hide the reason."""
    root = full_soon / "run" if what == "is read-only" else tmp_path / "run"
    config = Config(run_dir=str(root))
    config.logger.progress, config.logger.tensorboard = "plain", False

    def work(self: conductor.Conductor, stop: object) -> None:
        self.reporting.begin(conductor.RunState(seed=0), 3, None)
        if what == "vanishes":
            shutil.rmtree(self.directory.root)
        elif what == "is read-only":
            self.reporting.stepping()
            subprocess.run(["mount", "--bind", str(full_soon), str(full_soon)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(full_soon)], check=True)
        else:
            self.directory.metrics.symlink_to("/dev/full")
            self.directory.summary.unlink()
            self.directory.summary.symlink_to("/dev/full")
        self.reporting.step(1, 3, {"reward": 1.0})

    monkeypatch.setattr(conductor.Conductor, "work", work)
    ranks = SimpleNamespace(worlds={"actor": 1})
    continuation = SimpleNamespace(end_time=lambda: None)
    code = guarded(lambda: conductor.lead_run(config, ranks, None, "n1", continuation))  # type: ignore[arg-type]
    if what == "is read-only":
        subprocess.run(["umount", str(full_soon)], check=True)
    out, err = capsys.readouterr()
    assert code == DiskError.exit_code
    assert err.count("\n") == 1, err
    if what == "vanishes":
        assert err.startswith(f"slurm-rlhf: error: run_dir {tmp_path}/run has vanished: ")
    elif what == "is read-only":
        assert f"run_dir {root}: the file system {full_soon} is mounted for reading only. Have it" in err
        assert f"{root}/summary.json cannot be written, so it does not say how the run ended\n" in out
        assert Summary.read(root / "summary.json").status == "running"
    else:
        assert f"run_dir {tmp_path}/run: No space left on device: the file system /" in err
        assert "MiB free" in err
        assert "ckpt.max_num" in err


def test_a_command_that_meets_a_full_disk_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "out" / "model"))

    assert guarded(work) == 1
    assert f"{tmp_path}/out/model: No space left on device: the file system /" in capsys.readouterr().err


def test_a_run_directory_that_cannot_be_made_has_not_vanished() -> None:
    root = Path("/proc/no such place")
    with pytest.raises(DiskError, match=r"run_dir /proc/no such place cannot be made: .*: give another --run_dir"):
        make_run_directory(root, RunDirectory(root).make)


def test_a_full_disk_takes_the_end_of_a_run_and_one_that_cannot_keeps_what_it_has(full_soon: Path) -> None:
    file, ballast = full_soon / "summary.json", full_soon / "ballast"
    summary = Summary("running", 0, 9, None, None, None, None, 0.0, 0.0, 0, {"actor": 2}, 42)
    summary.write(file)
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as rest:
        while True:
            rest.write(bytes(4096))
    summary.status, summary.error = "failed", "run_dir: No space left on device\n" + "a line of a log\n" * 1000
    summary.write(file)
    found = Summary.read(file)
    assert (found.status, found.error) == ("failed", "run_dir: No space left on device")
    assert sorted(os.listdir(full_soon)) == ["ballast", "summary.json"]
    summary.error = "x" * 10_000
    with pytest.raises(OSError, match="No space left"):
        summary.write(file)
    subprocess.run(["mount", "-o", "remount,ro", str(full_soon)], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        summary.write(file)
    assert Summary.read(file) == found


@pytest.mark.parametrize("kind", ["another user's", "open to others", "a link"])
def test_a_directory_of_keys_that_others_have_a_hand_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whoever made it first could change what the processes of the run read there."""
    control = tmp_path / ".control"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        control.symlink_to(tmp_path / "elsewhere")
    else:
        control.mkdir(mode=0o700 if kind == "another user's" else 0o755)
    user = control.stat().st_uid
    if kind == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(DiskError, match=rf"{control} belongs to user {user} and has mode .*chmod 700"):
        make_run_directory(tmp_path, RunDirectory(tmp_path).make)


def test_a_run_directory_may_be_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        make_run_directory(tmp_path, RunDirectory(tmp_path).make)
