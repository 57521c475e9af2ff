"""Say where everything of a run lies, write files in one step, and explain why a disk refused."""

from __future__ import annotations

import errno
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

from slurm_rlhf.errors import DiskError, RemoteError


class RunDirectory:
    """Name the paths in `run_dir`; `docs/first_run.md` describes the files."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root
        self.config: Final = root / "config.toml"
        self.metrics: Final = root / "metrics.jsonl"
        self.samples: Final = root / "samples.jsonl"
        self.events: Final = root / "events.jsonl"
        self.timeline: Final = root / "timeline.jsonl"
        self.layout: Final = root / "layout.json"
        self.report: Final = root / "report.html"
        self.tensorboard: Final = root / "tensorboard"
        self.trackers: Final = root / "trackers"
        self.evaluations: Final = root / "eval"
        self.logs: Final = root / "logs"
        self.reward_log: Final = self.logs / "reward.log"
        self.checkpoints: Final = root / "checkpoints"
        self.final: Final = root / "final"
        self.summary: Final = root / "summary.json"
        self.keys: Final = root / ".control" / "keys.json"
        self.lock: Final = root / ".control" / "lock"
        self.restart_guard: Final = root / ".control" / "restart_guard"

    def role_log(self, role: str, node: str, rank: int | str) -> Path:
        return self.logs / f"{role}.{node}.{rank}.log"

    def hang(self, step: int, number: int) -> Path:
        """Return the directory of report `number` (from 1) on a hang in `step`."""
        return self.root / (f"hang-{step}" if number == 1 else f"hang-{step}.{number}")

    def aside(self, path: Path, number: int) -> Path:
        """Return the path for the file of an earlier start: metrics.1.jsonl for metrics.jsonl."""
        return path.with_name(f"{path.stem}.{number}{path.suffix}")

    def put_aside(self) -> str:
        """Move what an earlier start has measured aside; return the new name of its metrics, empty without any."""
        if not self.metrics.exists():
            return ""
        number = next(n for n in count(1) if not self.aside(self.metrics, n).exists())
        measured = (self.metrics, self.tensorboard, self.trackers, self.evaluations, self.samples, self.timeline)
        for path in measured:
            if path.exists():
                path.rename(self.aside(path, number))
        return self.aside(self.metrics, number).name

    def make(self) -> None:
        """Make the directories; only the owner can enter `.control`, which holds the keys.

        Raises PermissionError if `.control` belongs to another user, is a link, or is open to others, because files in
        it control the run.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        control = self.keys.parent
        control.mkdir(mode=0o700, exist_ok=True)
        found = control.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return
        raise PermissionError(
            errno.EPERM,
            f"{control} belongs to user {found.st_uid} and has mode {stat.filemode(found.st_mode)}; it has to be a "
            f"directory of user {os.geteuid()} that nobody else can enter (chmod 700, if it is yours), because it "
            "holds the keys of the run",
        )


def write_atomically(
    path: Path,
    text: str | Iterable[str],
    *,
    durable: bool = False,
    private: bool = False,
    errors: str = "strict",
    once: bool = False,
) -> None:
    """Replace `path` by a file with `text`, in one piece or many. Raises OSError; then an earlier file stays.

    `durable`: the file survives a crash of the node. `private`: only the owner can ever read it. `once`: raises
    FileExistsError where there is a file already.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    # O_EXCL: does not follow a link of another user.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors=errors) as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.writelines([text] if isinstance(text, str) else text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if once:
            os.link(temporary, path)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


MIB = 1 << 20
MOUNTS = Path("/proc/self/mounts")
_LITTLE = 64 * MIB
_FULL = ("No space left on device", "inline_container.cc", "PytorchStreamWriter")
_QUOTA = "Disk quota exceeded"
_LARGE = "File too large"
_READ_ONLY = "Read-only file system"
"""Error texts that stand for an errno which a library or another process has dropped. Torch's two texts mean any short
write, perhaps to another disk, so those of _FULL count only if less than _LITTLE is free here."""


def refusal(error: BaseException, place: Path, needed: int = 0) -> str:
    """Say why the file system of `place` refused; empty if `error` has another reason.

    `needed`: bytes that were to be written, if that is known.
    """
    number = _number(error, place, needed)
    _, point, kind = mount_of(place)
    where = f"the file system {point}{f' ({kind})' if kind else ''} has {_mib(_free(place))} MiB free"
    wanted = f", and {_mib(needed)} MiB are needed" if needed else ""
    if number == errno.ENOSPC:
        at = _statvfs(place)
        inodes = " (no inode is left: it holds too many files)" if at and at.f_files and not at.f_favail else ""
        return f"No space left on device: {where}{wanted}{inodes}"
    if number == errno.EDQUOT:
        return (
            f"Disk quota exceeded: {where}, but your quota on it is used up{wanted}: `quota -s`, or `lfs quota -h -u "
            f"$USER {point}` on Lustre, shows it"
        )
    if number == errno.EFBIG:
        return f"File too large: {where}, but this process may write no larger file: raise `ulimit -f`"
    if number == errno.EROFS:
        return f"the file system {point} is mounted for reading only"
    return ""


def remedy(error: BaseException, place: Path, needed: int = 0, more: str = "") -> str:
    """Say what to do about a `refusal`; `more` adds to the advice on checkpoints."""
    number = _number(error, place, needed)
    if number == errno.EFBIG:
        return "Raise that limit"
    other = "set run_dir to another disk"
    if number == errno.EROFS:
        return f"Have it mounted for writing again, or {other}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"Free space there, keep fewer checkpoints (ckpt.max_num{more}), or {other}"
    return other.capitalize()


def most_files() -> int:
    """Return how many files and connections this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def files_exhausted() -> str:
    """Say that no more files or connections can be opened, and what to do."""
    return (
        f"Too many open files: this process may have {most_files()} open, connections included (`ulimit -n`). Raise "
        "that limit (nofile in limits.conf, LimitNOFILE of slurmd)"
    )


def vanished(root: Path) -> str:
    """Say that the run directory `root` is gone, and what to do."""
    return (
        f"run_dir {root} has vanished: it was removed or renamed, or its disk unmounted, while the run was going. Put "
        "it back to go on from its newest checkpoint; without it the run starts from the beginning"
    )


def make_run_directory(root: Path, make: Callable[[], None]) -> None:
    """Call `make`, which makes the run directory `root`. Raises DiskError where that is not possible."""
    try:
        make()
    except OSError as error:
        why = refusal(error, root) or error.strerror
        others = "of eval: --output; of sft, rm and dpo: their output_dir"
        raise DiskError(f"run_dir {root} cannot be made: {why}: give another --run_dir ({others})") from error


@contextmanager
def run_directory_kept(root: Path) -> Iterator[None]:
    """Raise DiskError for errors of this process or of roles if the disk of `root` is full, or `root` has vanished."""
    try:
        yield
    except (OSError, RemoteError) as error:
        file = getattr(error, "filename", None)
        if file and not Path(str(file)).absolute().is_relative_to(root.absolute()):
            raise
        if not root.is_dir():
            raise DiskError(vanished(root)) from error
        reason = refusal(error, root)
        if not reason:
            raise
        raise DiskError(f"run_dir {root}: {reason}. {remedy(error, root)}, then start the same again") from error


def mount_of(path: Path, table: Path = MOUNTS) -> tuple[str, Path, str]:
    """Return device (or `server:/directory`), mount point and type of the file system of `path`; "", "/" and "" if the
    table does not have it.
    """
    device, best, kind = "", Path("/"), ""
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return device, best, kind
    path = path.resolve()
    for line in lines:
        source, mount, name = (word.replace("\\040", " ") for word in line.split()[:3])
        point = Path(mount)
        if path.is_relative_to(point) and len(point.parts) >= len(best.parts):
            device, best, kind = source, point, name
    return device, best, kind


def size_of(directory: Path) -> int:
    """Add up the sizes of all files in `directory`, except those that vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _number(error: BaseException, place: Path, needed: int) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    words = str(error)
    if _QUOTA in words:
        return errno.EDQUOT
    if _LARGE in words:
        return errno.EFBIG
    if _READ_ONLY in words and (found := _statvfs(place)) and found.f_flag & os.ST_RDONLY:
        return errno.EROFS
    little = _free(place) < max(needed, _LITTLE)
    return errno.ENOSPC if little and any(text in words for text in _FULL) else 0


def _statvfs(place: Path) -> os.statvfs_result | None:
    there = next(path for path in (place, *place.absolute().parents) if path.exists())
    try:
        return os.statvfs(there)
    except OSError:
        return None


def _free(place: Path) -> int:
    found = _statvfs(place)
    return found.f_bavail * found.f_frsize if found else 0


def _mib(size: int) -> str:
    return f"{size / MIB:.0f}" if size >= 10 * MIB else f"{size / MIB:.1f}"
