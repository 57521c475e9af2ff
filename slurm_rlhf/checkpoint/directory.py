"""Write the checkpoints of a run so that a kill at any moment leaves the previous one usable.

step_000010.tmp/     roles and conductor write here; not a checkpoint until it is renamed
step_000010/         whole, with its manifest
step_000010.old/     the checkpoint that a new one of the same step is about to replace; still whole
step_*.tmp           also a checkpoint that is being deleted: it is renamed before its first file is removed

How often to save: a save costs the run C seconds. A failure, one in every M seconds, costs the work since the newest
checkpoint: half an interval T on average. So a share C / T + T / (2 M) of the time is lost, least at T = sqrt(2 C M).
Source: Young, A First Order Approximation to the Optimum Checkpoint Interval (1974); Daly (2006) is the next order.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.checkpoint import resume
from slurm_rlhf.checkpoint.resume import describe, entries, passed_over, read, verify, write, write_state
from slurm_rlhf.errors import CheckpointError, RemoteError
from slurm_rlhf.observe.run_log import BEGINS, ENDS, ERROR, HANG, REQUEUE, RESTART, RunEvent
from slurm_rlhf.run_directory import MIB, refusal, remedy, size_of, vanished


class CheckpointDir:
    """Save, find and prune `<run_dir>/checkpoints/step_000010/`: a directory per role, state.json, manifest.json.

    Only the conductor calls it; the roles write into the directory that `begin` returns. To save:

        path = checkpoints.begin(step)      # then every role writes into path / <role> and closes its files
        checkpoints.commit(step, state)     # from here on it exists
        checkpoints.prune(max_num)
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.root = Path(run_dir) / "checkpoints"

    def begin(self, step: int) -> Path:
        """Make an empty directory for the roles to write into, each under its own name.

        Removes what interrupted saves have left. Raises CheckpointError when the disk refuses.
        """
        with self.explained(step):
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in self.root.glob("step_*.tmp"):
                shutil.rmtree(leftover)
            path = self._temporary(step)
            path.mkdir()
        return path

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Complete what `begin` started, once every role has written, and return its final path.

        Adds the state and the manifest, forces all of it to disk, then renames. Replaces a checkpoint of the same
        step. Blocks for as long as the disk needs. Raises CheckpointError when the disk refuses, TypeError for a state
        that JSON does not have (see `resume.write_state`); the earlier checkpoints are untouched then.
        """
        temporary, final = self._temporary(step), self.of(step)
        with self.explained(step):
            if not temporary.is_dir() and self.root.parent.is_dir():
                raise CheckpointError(
                    f"{temporary} has vanished while checkpoint {step} was written into it. Does another run use the "
                    "same run_dir? Give each run its own"
                )
            write_state(state, temporary)
            serial = max((entry.manifest.serial for entry in resume.entries(self.root)[0]), default=0) + 1
            write(describe(temporary, step, serial), temporary)
            for parent, _, names in os.walk(temporary, topdown=False):
                for name in names:
                    _flush(os.path.join(parent, name))
                _flush(parent)
            _make_way(final)
            os.rename(temporary, final)
            _flush(self.root)
            if _old(final).exists():
                _remove(_old(final))
        return final

    def prune(self, max_num: int, kept: Collection[int] = ()) -> None:
        """Remove all but the newest `max_num` checkpoints and those of the steps `kept`.

        Directories without a readable manifest are not counted and not removed. Raises CheckpointError when the
        disk refuses.
        """
        older = resume.entries(self.root)[0][max_num:]
        for surplus in reversed([entry.path for entry in older if entry.manifest.step not in kept]):
            with self.explained(None):
                _remove(surplus)

    def of(self, step: int) -> Path:
        """Return the path of a step's checkpoint, whether it is there or not."""
        return self.root / f"step_{step:06d}"

    def resolve(self, resume_key: str) -> Path | None:
        """Return the checkpoint that the key `resume` asks for (see `resume.resolve`). Raises CheckpointError."""
        return resume.resolve(self.root, resume_key)

    @contextmanager
    def explained(self, step: int | None) -> Iterator[None]:
        """Turn errors of the disk into CheckpointError while checkpoint `step` is written (None: old ones are removed).

        It says how full the disk is, how much a checkpoint needs, and which one is still usable. An error of a role
        counts, too, if its text says that a disk is full.
        """
        try:
            yield
        except (OSError, RemoteError) as error:
            sizes = [size_of(entry.path) for entry in resume.entries(self.root)[0]]
            begun = 0 if step is None or sizes else size_of(self._temporary(step))
            needed = max(sizes, default=0)
            refused = refusal(error, self.root, needed)
            if isinstance(error, RemoteError) and not refused:
                raise
            what = "checkpoints could not be pruned" if step is None else f"checkpoint {step} could not be written"
            if not self.root.parent.is_dir():
                raise CheckpointError(f"{what}: {vanished(self.root.parent)}") from error
            if refused and begun:
                refused += f"; {begun / MIB:.1f} MiB were written before that"
            usable = resume.latest(self.root)
            rest = f"The newest whole checkpoint is {usable}" if usable else "There is no earlier checkpoint"
            raise CheckpointError(
                f"{what} in {self.root}: {refused or error}. {rest}. "
                f"{remedy(error, self.root, needed, f'; {len(sizes)} are there')}, then resume"
            ) from error

    def _temporary(self, step: int) -> Path:
        return self.root / f"step_{step:06d}.tmp"


def _old(final: Path) -> Path:
    return final.with_name(final.name + ".old")


def _make_way(final: Path) -> None:
    """Free the final name; at every moment a whole checkpoint exists, if one did before."""
    if not final.exists():
        return
    try:
        verify(final)
    except CheckpointError:
        _remove(final)
        return
    if _old(final).exists():
        _remove(_old(final))
    os.rename(final, _old(final))


def _remove(path: Path) -> None:
    renamed = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    os.rename(path, renamed)
    shutil.rmtree(renamed)


def _flush(path: str | Path) -> None:
    """Force a file or directory to disk, whichever process wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some parallel file systems cannot fsync a directory and report EINVAL.
        if error.errno != errno.EINVAL or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class WayBack:
    """Remembers which checkpoints existed when a run started, so that a restart in place goes back to the right one."""

    directory: CheckpointDir
    first: Path | None  # the checkpoint that the run started from; None: it began anew
    serial: int  # serial of the newest checkpoint at that time

    @classmethod
    def of(cls, directory: CheckpointDir, first: Path | None) -> WayBack:
        """Note the checkpoints that exist now."""
        found = entries(directory.root)[0]
        return cls(directory, first, max((entry.manifest.serial for entry in found), default=0))

    def find(self, tell: Callable[[str], None]) -> Path | None:
        """Return the newest whole checkpoint that the run has written since, or else the one that it started from.

        None: it begins anew. `tell` gets a warning for each newer one that is damaged. Raises CheckpointError where
        there are checkpoints and none of them is whole.
        """
        newest = self.directory.resolve("auto")
        if newest is None or read(newest).serial <= self.serial:
            newest = self.first
        if newest is not None:
            for problem in passed_over(self.directory.root, newest):
                tell(f"warning: {problem}; the run goes back to {newest.name}, which is whole")
        return newest


LONGEST_S = 3600.0
"""Longest interval between saves, however rare failures are, unless LEAST_SHARE forbids it."""
LEAST_SHARE = 0.05
"""Share of the time that saves may take; the interval becomes longer than LONGEST_S if they would take more."""


def best_interval(cost_s: float, written_s: float, mtbf_s: float) -> float:
    """Return the seconds from save to save.

    cost_s: seconds in which a save delays the steps; written_s: seconds until it is on disk, longer with async_save;
    mtbf_s: mean time between failures. The result is at least `written_s`, and at most an hour, if saving every hour
    costs less than `LEAST_SHARE` of the time.
    """
    best = math.sqrt(2.0 * cost_s * mtbf_s)
    longest = max(LONGEST_S, cost_s / LEAST_SHARE)
    return max(min(best, longest), written_s, cost_s)


def in_steps(interval_s: float, step_s: float) -> int:
    """Return the whole steps of an interval, at least 1."""
    return max(1, int(interval_s / max(step_s, 1e-9)))


@dataclass(frozen=True, slots=True)
class Failures:
    """Hold how often a run has failed."""

    stops: int  # stops of this run before it could save
    observed_s: float  # over all of its sessions
    nodes: int
    mtbf_hours: float  # hours between failures of one node

    @property
    def mtbf_s(self) -> float:
        """Return the mean time between failures: of this run if it had any, else ckpt.mtbf_hours over its nodes."""
        if self.stops:
            return self.observed_s / self.stops
        return self.mtbf_hours * 3600.0 / self.nodes

    def words(self) -> str:
        """Say where the number comes from."""
        between = f"{span(self.mtbf_s)} between failures"
        if self.stops:
            return f"{between}: this run had {self.stops} in {span(self.observed_s)}"
        return f"{between}: ckpt.mtbf_hours = {self.mtbf_hours:g} over {self.nodes} node{'s' * (self.nodes > 1)}"


def span(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def failures(events: Sequence[RunEvent], nodes: int, mtbf_hours: float) -> Failures:
    """Count the failures of a run in its events; the last session is the one under way.

    A session has failed if it had done a step and was ended by an error, by a hang or without an event, because its
    conductor was killed. A session that got a signal to stop has saved. A restart of the trainers within a session is a
    failure, too.
    """
    stops = sum(event.event == RESTART for event in events)
    sessions: list[list[RunEvent]] = []
    for event in events:
        if event.event in BEGINS or not sessions:
            sessions.append([])
        sessions[-1].append(event)
    observed = sum(session[-1].at - session[0].at for session in sessions)
    for session in sessions[:-1]:
        ended = session[-1].event
        failed = ended in (ERROR, HANG) or ended not in (*ENDS, REQUEUE)
        stops += failed and session[-1].step > session[0].step
    return Failures(stops, observed, nodes, mtbf_hours)
