"""Directories of compiled kernels: found again, never shared, closed to others, bounded."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_rlhf.cluster import local_directory
from slurm_rlhf.cluster.local_directory import (
    CACHES,
    KernelCache,
    cache_variables,
    local_places,
    prune,
    take_kernel_cache,
)
from slurm_rlhf.wire import timeouts

Take = Callable[..., KernelCache]


@pytest.fixture
def take(tmp_path: Path) -> Iterator[Take]:
    """Takes a directory below `tmp_path`, as a process of its own would."""
    taken: list[KernelCache] = []

    def call(role: str = "rollout", index: int = 0, limit_gib: float = 1.0) -> KernelCache:
        cache, stated = take_kernel_cache(str(tmp_path), role, index, limit_gib)
        assert cache is not None, stated
        assert stated == f"compiled kernels are kept in {cache.directory}"
        taken.append(cache)
        return cache

    yield call
    for cache in taken:
        leave(cache)


def leave(cache: KernelCache) -> None:
    """As the kernel does for a process that ends."""
    if cache._lock >= 0:
        os.close(cache._lock)
        cache._lock = -1


def write(cache: KernelCache, name: str = "kernel", size: int = 10) -> Path:
    file = Path(cache_variables(cache.directory)["TRITON_CACHE_DIR"]) / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"x" * size)
    return file


def test_a_rank_finds_its_kernels_again_after_it_was_killed(take: Take) -> None:
    first = take()
    file = write(first)
    first.started()
    leave(first)
    again = take()
    assert again.directory == first.directory
    assert file.read_bytes() == b"x" * 10
    assert set(cache_variables(again.directory)) == set(CACHES)
    assert take("actor").directory != again.directory
    assert take("rollout", 1).directory != again.directory


def test_what_was_half_written_at_a_start_is_removed(take: Take, tmp_path: Path) -> None:
    """vLLM writes its index in place: half of one would end every later start."""
    first = take()
    file = write(first)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (first.directory / "link").symlink_to(elsewhere)
    leave(first)  # killed before it had started
    again = take()
    assert again.directory == first.directory
    assert not file.exists()
    assert not (again.directory / "link").is_symlink()
    assert (elsewhere / "kept").exists()


def test_the_lock_file_of_a_killed_compiler_keeps_nobody_waiting(take: Take) -> None:
    """torch's own, of which it says only that somebody is at it."""
    first = take()
    first.started()
    baton = first.directory / "extensions" / "fused_adam" / "lock"
    baton.parent.mkdir(parents=True)
    baton.touch()
    (baton.parent / "fused_adam.so").touch()
    leave(first)
    take()
    assert not baton.exists()
    assert (baton.parent / "fused_adam.so").exists()


RANK = """
import sys, time
from slurm_rlhf.cluster.local_directory import take_kernel_cache
cache, stated = take_kernel_cache(sys.argv[1], "rollout", int(sys.argv[2]), 1.0)
print(cache.directory if cache else stated, flush=True)
sys.stdin.readline()
for n in range(200):
    (cache.directory / "index").write_text(str(cache.directory) * 100)
    assert (cache.directory / "index").read_text() == str(cache.directory) * 100
"""


@pytest.mark.slow
def test_ranks_that_start_together_write_apart(tmp_path: Path) -> None:
    """Two runs of two ranks each on one node: each has a directory to itself, whoever comes first."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(number % 2)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    stated = [rank.stdout.readline().strip() for rank in ranks if rank.stdout]
    assert sorted(Path(line).name for line in stated) == ["rollout.0", "rollout.0.1", "rollout.1", "rollout.1.1"]
    ends = [rank.communicate("go\n") for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, ends
    cache, _ = take_kernel_cache(str(tmp_path), "rollout", 1, 1.0)
    assert cache.directory.name == "rollout.1"
    leave(cache)


def test_nobody_else_can_look_in_or_was_there_first(
    take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = take().directory.parent.parent
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o777)
    leave(take(index=5))
    assert root.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    theirs = tmp_path / "slurm_rlhf_kernels.54321"
    theirs.mkdir(mode=0o777)
    stated = refused(tmp_path)
    assert f"slurm_rlhf_kernels.54321 there belongs to user {theirs.stat().st_uid}" in stated
    theirs.rmdir()
    theirs.symlink_to(root)
    assert "slurm_rlhf_kernels.54321 is not a directory there" in refused(tmp_path)


def refused(base: Path) -> str:
    cache, stated = take_kernel_cache(str(base), "rollout", 0, 1.0)
    assert cache is None
    assert stated.startswith(f"compiled kernels are not kept: {base}: ")
    assert "train.kernel_cache" in stated
    return stated


def test_a_full_disk_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node with GPUs, before anything is written there, and also where the system says so only then."""
    places = [tmp_path / "disk", tmp_path / "other"]
    for place in places:
        place.mkdir()
    monkeypatch.setattr(local_directory, "ACCELERATORS", (tmp_path / "none", tmp_path))
    monkeypatch.setattr(local_directory, "local_places", lambda: places)
    usage = shutil.disk_usage(places[0])
    small = {places[0]}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=5 << 20) if path.parent in small else usage
    )

    def uses_the_other() -> bool:
        cache, _ = take_kernel_cache("auto", "actor", 0, 1.0)
        leave(cache)
        return cache.directory.is_relative_to(places[1])

    assert uses_the_other()
    small.add(places[1])
    none, stated = take_kernel_cache("auto", "actor", 0, 1.0)
    assert none is None
    assert f"{places[0]}: only 5 MiB are free; {places[1]}: only 5 MiB are free" in stated
    small.clear()
    made = Path.mkdir

    def full(self: Path, *arguments: Any, **named: Any) -> None:
        if self.is_relative_to(places[0]):
            raise OSError(errno.ENOSPC, "No space left on device")
        made(self, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    assert uses_the_other()


def test_a_rank_that_holds_the_lock_does_not_hang_the_others(take: Take, monkeypatch: pytest.MonkeyPatch) -> None:
    root = take().directory.parent.parent
    monkeypatch.setattr(timeouts, "KERNEL_LOCK_S", 0.1)
    way = local_directory._try_lock(root)
    try:
        assert "another process has held its lock" in refused(root.parent)
    finally:
        os.close(way)


def test_other_versions_have_other_directories(take: Take, monkeypatch: pytest.MonkeyPatch) -> None:
    first = take()
    file = write(first)
    first.started()
    leave(first)
    usual = local_directory.version
    monkeypatch.setattr(local_directory, "version", lambda name: "9.9" if name == "torch" else usual(name))
    newer = take()
    assert newer.directory.parent.name.startswith("torch-9.9-")
    assert newer.directory.name == first.directory.name
    assert file.exists()
    monkeypatch.setattr(local_directory, "version", usual)
    assert take().directory == first.directory
    monkeypatch.setattr(local_directory, "DRIVER", Path(__file__))
    assert take().directory.parent not in (first.directory.parent, newer.directory.parent)


def test_the_longest_unused_go_first_and_none_that_is_in_use(take: Take) -> None:
    caches = [take("rollout", index) for index in range(4)]
    for number, cache in enumerate(caches):
        write(cache, size=1 << 20)
        cache.started()
        os.utime(cache.directory / ".lock", (1000 + number, 1000 + number))
    root = caches[0].directory.parent.parent
    for cache in caches[1:]:
        leave(cache)
    prune(root, int(2.5 * 2**20))  # the oldest is in use
    assert [cache.directory.exists() for cache in caches] == [True, False, False, True]
    leave(caches[3])
    leave(caches[0])
    mine = take(limit_gib=0.0001)  # not even the last one fits
    assert [cache.directory.exists() for cache in caches] == [True, False, False, False]
    assert not (mine.directory / "triton").exists()


def test_where_there_is_nothing_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_directory, "ACCELERATORS", (tmp_path / "none",))
    assert take_kernel_cache("auto", "actor", 0, 1.0) == (None, "no accelerator here, so no kernels to keep")
    assert take_kernel_cache("none", "actor", 0, 1.0)[0] is None
    assert not list(tmp_path.iterdir())


def test_disks_of_the_node_come_before_memory_and_before_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"/var/tmp": "lustre", "/tmp": "tmpfs"}
    monkeypatch.setattr(local_directory, "mount_of", lambda path: ("", path, kinds[str(path)]))
    assert local_places() == [Path("/tmp"), Path("/var/tmp")]
    kinds["/tmp"] = "nfs"
    assert local_places() == [Path("/var/tmp"), Path("/tmp")]


def test_on_a_shared_file_system_a_node_has_directories_of_its_own(take: Take, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its locks may hold on one node only."""
    alone = take().directory
    monkeypatch.setattr(local_directory, "mount_of", lambda path: ("", path, "nfs4"))
    monkeypatch.setattr(local_directory.platform, "node", lambda: "gpu007.cluster")
    here = take()
    assert here.directory == alone.parent / "gpu007" / alone.name
    write(here, size=1 << 20)
    leave(here)
    prune(alone.parent.parent, 1 << 10)
    assert not here.directory.exists()
    assert alone.exists()
