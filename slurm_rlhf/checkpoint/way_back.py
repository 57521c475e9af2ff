"""Find the checkpoint to which a run goes back that breaks and goes on in the same job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.checkpoint.manifest import read
from slurm_rlhf.checkpoint.resume import entries, passed_over


@dataclass(frozen=True, slots=True)
class WayBack:
    """Remembers what was there when a run started."""

    directory: CheckpointDir
    first: Path | None  # the checkpoint that it started from; None: it began anew
    serial: int  # of the newest checkpoint of then

    @classmethod
    def of(cls, directory: CheckpointDir, first: Path | None) -> WayBack:
        """Look at what is there now."""
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
