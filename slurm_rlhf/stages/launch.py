"""Start the ranks of a stage as the role `actor` of a Slurm job or of this machine, and go on in another allocation."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rlhf.checkpoint.directory import CheckpointDir, WayBack
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.cluster.stop import STOP_FILE, Stop, StopRequested
from slurm_rlhf.config.keys import changed, get
from slurm_rlhf.config.roles import ACTOR, of_command
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import RoleDied, printable
from slurm_rlhf.groups.restarts import RunFailure, refusal
from slurm_rlhf.groups.run_lock import lead, occupied
from slurm_rlhf.nodes.environment import role_environment
from slurm_rlhf.nodes.launcher import Ended, Launcher
from slurm_rlhf.nodes.requeue import continuation_of
from slurm_rlhf.nodes.ways import ways
from slurm_rlhf.observe.log_tail import quoted
from slurm_rlhf.observe.run_log import read_object
from slurm_rlhf.observe.run_status import read_run_status, write_summary
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import RunKeys

_GROWING = ("metrics.jsonl", "reference-*")
"""Files that grow with what a stage has done."""


@dataclass(slots=True)
class StageJob:
    """Leads the ranks of a stage; implements `groups.run_lock.Leader`."""

    config: Config
    name: str
    directory: RunDirectory
    ranks: RankMap
    launcher: Launcher
    checkpoint: Path | None = None  # the one that this start goes on from
    _shown: int = field(default=0, init=False)  # bytes of the stage's log
    _before: int = field(default=0, init=False)  # bytes of the first rank's log that are of earlier starts
    _ended: list[Ended] = field(default_factory=list, init=False)  # how the ranks ended that were started last
    _failures: list[RunFailure] = field(default_factory=list, init=False)
    _kept: list[tuple[str, int]] = field(default_factory=list, init=False)  # files of the reference's log-probs before

    def work(self, stop: Stop) -> None:
        """Start the ranks, and wait until they have written the model; where one dies they start again.

        Raises StopRequested, and RoleDied without a model.
        """
        RunKeys.create(self.directory.keys)
        self._shown = self._log.stat().st_size if self._log.exists() else 0
        self._kept = self._sizes("reference-*")
        back = WayBack.of(CheckpointDir(self.directory.root), self.checkpoint)
        self.tell(f"{self.name}: {', '.join(ways(self.config, [ACTOR], self.ranks))}")
        try:
            while True:
                before = self._sizes(*_GROWING)
                self._train(stop, before)
                out = Path(get(self.config, f"{self.name}.output_dir"))
                if out.is_dir() and any(out.iterdir()):
                    return
                stop.check()
                self._begin_again(back, before)
        finally:
            stop.ignore_signals()
            self.launcher.stop(bool(self._ended), timeouts.RANKS_LEAVE_S)
            self.directory.keys.unlink(missing_ok=True)
            self._show()

    def _train(self, stop: Stop, before: list[tuple[str, int]]) -> None:
        """Start the ranks, and wait until they have ended. Raises StopRequested when they have saved.

        `before`: the sizes of files now. While they stay, the ranks have nothing to save, and may never be complete.
        """
        self._ended = []
        self.directory.config.write_text(dump_toml(self.config), encoding="utf-8")
        log = self._rank_log
        self._before = log.stat().st_size if log.exists() else 0
        environment = role_environment(self.config, self.ranks, len(os.sched_getaffinity(0)))[ACTOR]
        program = "--program=slurm_rlhf.stages.stage:train_stage"
        arguments = [f"--role={ACTOR}", f"--run_dir={self.directory.root}", program, f"--words={self.name}"]
        self.launcher.start(ACTOR, arguments, environment)
        try:
            with stop.droppable():
                self._ended = self._wait()
        except StopRequested:
            (self.directory.root / STOP_FILE).touch()  # after their step the ranks save, and end
            if self._sizes(*_GROWING) != before:
                self._ended = self._wait(self.config.timeout.collective)
            raise

    def _begin_again(self, back: WayBack, before: list[tuple[str, int]]) -> None:
        """End what is left of the ranks, and have the next ones go on from the newest checkpoint.

        `before`: the sizes of files when the ranks started. Raises RoleDied where nothing came of that start, as with
        a mistake in the user's files, or after train.max_restarts.
        """
        first, most = self._ended[0], self.config.train.max_restarts
        what = f"the process group of {self.name} on {first.node} {first.how}, and no model was written"
        died = RoleDied(f"{what}\n{quoted(self._rank_log, 3, self._before)}")
        if not most or self.launcher.fixed or set(self._sizes(*_GROWING)) <= set(before):
            raise died
        step = read_run_status(self.directory.metrics, self.directory.summary).step
        self._failures.append(RunFailure(step, str(died)))
        if why := refusal(self._failures, most):
            self.tell(f"{self.name} is not started again in this job: {why}")
            raise died
        self.launcher.end((ACTOR,), self.ranks)
        newest = back.find(self.tell)
        self.config = changed(self.config, {"resume": str(newest or "never")})
        self.tell(f"{died}\nrestart {len(self._failures)} of {most} in this job, from {newest or 'the beginning'}")

    def _sizes(self, *patterns: str) -> list[tuple[str, int]]:
        """List the files of the run directory that `patterns` match, with their sizes."""
        found = (path for pattern in patterns for path in self.directory.root.glob(pattern))
        return sorted((path.name, path.stat().st_size) for path in found)

    @property
    def _rank_log(self) -> Path:
        return self.directory.role_log(ACTOR, self.ranks.roles[ACTOR][0].node, 0)

    @property
    def _log(self) -> Path:
        return self.directory.root / f"{self.name}.log"

    def _wait(self, seconds: float = float("inf")) -> list[Ended]:
        """Wait until the ranks of a node have ended, for `seconds` at most, and show what the stage says meanwhile."""
        last = time.monotonic() + seconds
        while not (ended := self.launcher.ended()) and time.monotonic() < last:
            self._show()
            time.sleep(timeouts.POLL_S)
        return ended

    def _show(self) -> None:
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._shown)
                new = file.read()
            self._shown += len(new)
            for line in new.decode(errors="replace").splitlines():
                self.tell(f"{self.name}: {line}")

    def stopped(self, request: StopRequested) -> bool:
        """Return whether this start has saved anything."""
        kept = self._sizes("reference-*") != self._kept
        return kept or CheckpointDir(self.directory.root).resolve("auto") != self.checkpoint

    def failed(self, error: BaseException) -> None:
        """Write that it failed into the summary, if there is one."""
        if known := read_object(self.directory.summary):
            with contextlib.suppress(OSError):  # the disk does not take it: `error` says so already
                write_summary(self.directory.summary, {**known, "status": "failed", "error": str(error)})

    def tell(self, line: str) -> None:
        """Print a line."""
        print(printable(line), flush=True)


def launch(config: Config, name: str, ranks: RankMap, launcher: Launcher) -> int:
    """Train the stage `name` on `ranks`; return the exit code, and raise, as `groups.run_lock.lead`."""
    directory = RunDirectory(Path(of_command(config, name).run_dir))
    continuation = continuation_of(config.slurm, directory.root, os.environ)
    end, lead_s = continuation.end_time(), config.slurm.signal_lead_s
    with occupied(directory, node_name(), end, lead_s):
        checkpoint = CheckpointDir(directory.root).resolve(config.resume)
        job = StageJob(config, name, directory, ranks, launcher, checkpoint)
        return lead(job, directory, end, lead_s, continuation)
