"""Find in the logs of a run what its present start has written: earlier starts wrote into the same files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.observe.log_tail import FailedProcess, first_failure, quoted
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.messages import Peer

_LINES = 12


class StartLogs:
    """Name the logs of each process of a run, and read them from where the present start began to write."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self.mark()

    def mark(self) -> None:
        """Begin a start: what was written before is not what this one dies of."""
        self._sizes = {path: _seen(path)[1] for path in self._directory.logs.glob("*.log")}

    def of_peer(self, peer: Peer) -> list[Path]:
        """Name the log of a rank."""
        return [self._directory.role_log(peer.role, peer.host, peer.rank)]

    def of_ranks(self, role: str, node: str, ranks: Iterable[int]) -> list[Path]:
        """Name the logs of ranks on a node, from before and after they knew which they are."""
        return [self._directory.role_log(role, node, name) for rank in ranks for name in (rank, f"{rank}.start")]

    def of_role(self, role: str) -> list[Path]:
        """List the logs of all ranks of a role, and of its torchruns."""
        logs = self._directory.logs
        return [*logs.glob(f"{role}.*.[0-9]*.log"), *logs.glob(f"{role}.*torchrun.log")]

    def of_srun(self, role: str) -> list[Path]:
        """Name the log of the srun of a role."""
        return [self._directory.logs / f"{role}.srun.log"]

    def of_torchrun(self, role: str, node: str) -> Path:
        """Name the log of a torchrun."""
        return self._directory.role_log(role, node, "torchrun")

    def of_end(self, end: Ended) -> list[Path]:
        """List the logs that may say why a process group ended: what its ranks have written, or else the whole role."""
        own = self._written(self._directory.logs.glob(f"{end.role}.{end.node}.[0-9]*.log"))
        return own or [*self.of_role(end.role), end.log]

    def first_failure(self, role: str, node: str) -> FailedProcess | None:
        """Return the rank that failed first by the report of its torchrun; None if there is none."""
        log = self.of_torchrun(role, node)
        return first_failure(log, self._sizes.get(log, 0))

    def quote(self, logs: Sequence[Path]) -> str:
        """Quote the end of the newest of `logs`."""
        newest = max(self._written(logs), key=_seen, default=logs[-1])
        return quoted(newest, _LINES, self._sizes.get(newest, 0))

    def _written(self, logs: Iterable[Path]) -> list[Path]:
        return [log for log in logs if _seen(log)[1] > self._sizes.get(log, 0)]


def _seen(log: Path) -> tuple[float, int]:
    """Return when a file was written, and its size; zeros where there is none, or its file system does not answer."""
    try:
        found = log.stat()
    except OSError:
        return 0.0, 0
    return found.st_mtime, found.st_size
