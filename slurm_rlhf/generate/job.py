"""Runs one job: claims the output, starts the engines, hands out rows, and writes the answers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.cluster.stop import Stop, StopRequested
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import RoleDied, printable
from slurm_rlhf.generate.answers import VERSION, PendingRows
from slurm_rlhf.generate.merge import merge
from slurm_rlhf.generate.output import MERGED, OutputFile
from slurm_rlhf.generate.progress import JobProgress
from slurm_rlhf.generate.row_calls import Answered, Gone, RowCalls
from slurm_rlhf.groups.role_environment import role_environment
from slurm_rlhf.groups.run_lock import lead, occupied
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.nodes.requeue import continuation_of
from slurm_rlhf.observe.run_status import write_summary
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.run_directory import RunDirectory, run_directory_kept
from slurm_rlhf.wire.handles import EngineHandle

WAIT_S = 0.2


@dataclass(slots=True)
class GenerateJob:
    """Answers the rows of one output. `config`: the engines' configuration, by `engine_config`."""

    config: Config
    directory: RunDirectory
    ranks: RankMap
    launcher: Launcher
    output: OutputFile
    pending: PendingRows
    progress: JobProgress
    calls: RowCalls | None = field(default=None, init=False)

    def work(self, stop: Stop) -> None:
        """Answer every row, and write the summary. Raises as `run`."""
        self.run(stop)
        self.output.sync(time.monotonic(), 0.0)
        self.finish("finished")

    def stopped(self, request: StopRequested) -> bool:
        """Write the summary of a job that stops; answer whether this start has written any row."""
        self.output.sync(time.monotonic(), 0.0)
        self.finish("stopped")
        return len(self.output.counts.done) > self.progress.before

    def failed(self, error: BaseException) -> None:
        """Write the summary of a job that fails."""
        with contextlib.suppress(OSError):  # the disk does not take the summary: `error` says so already
            self.finish("failed", str(error))

    def run(self, stop: Stop) -> None:
        """Answer every row. Raises StopRequested, RunError when no engine is left, RewardError, OSError."""
        refused = self.pending.refuse_bad_rows()
        self.output.append(refused)
        self.progress.refused = len(refused)
        if not self.pending.queue.unfinished:
            return
        supervisor = Supervisor(self.config, self.directory, self.ranks, self.launcher)
        try:
            with stop.droppable():
                supervisor.start(role_environment(self.config, self.ranks, len(os.sched_getaffinity(0))))
                handle, engines = supervisor.roles[ROLLOUT], supervisor.engines
                assert isinstance(handle, EngineHandle)
                assert engines is not None
                self.calls = RowCalls(handle, engines)
                engines.begin_apart(VERSION)
                self.tell(f"starting {handle.world} engines")
                while self.pending.queue.unfinished:
                    self._turn(self.calls)
                    if supervisor.failure is not None:
                        raise supervisor.failure
        finally:
            stop.ignore_signals()
            supervisor.stop()
            ready = len(self.calls.ready) if self.calls else 0
            self.tell(self.progress.line(self.output.counts, ready, time.monotonic()))

    def _turn(self, calls: RowCalls) -> None:
        """Write the answers that have come, and hand out rows to engines that have room."""
        answered: list[Answered] = []
        for news in calls.wait(WAIT_S):
            if isinstance(news, Answered):
                answered.append(news)
            else:
                self._lose(calls, news)
        self.output.append(self.pending.take(calls, answered, self.progress))
        now = time.monotonic()
        self.output.sync(now)
        for engine in calls.ready:
            self.progress.works(now)
            self.pending.feed(calls, engine, now)
        if calls.ready and self.progress.due(now):
            self.tell(self.progress.line(self.output.counts, len(calls.ready), now))
            self._write_summary("running")

    def _lose(self, calls: RowCalls, news: Gone) -> None:
        rows = self.pending.queue.lose(news.engine)
        rest = calls.handle.world - len(calls.gone)
        self.tell(
            f"engine {news.engine} on {calls.engines.node(news.engine)} is lost: {news.why}\n"
            f"its {len(rows)} rows go to others; {rest} of {calls.handle.world} engines are left"
        )
        if rest:
            return
        for error in calls.engines.refused:
            raise error
        raise RoleDied(
            f"no engine is left; the last one: {news.why}\nThe {len(self.output.counts.done)} responses so far are in "
            f"{self.output.path}; the same command goes on from there."
        )

    def _write_summary(self, status: str, **more: Any) -> None:
        lost = self.calls.gone if self.calls else {}
        summary = self.progress.summary(status, self.output.counts, lost, time.monotonic(), **more)
        write_summary(self.directory.summary, summary)

    def tell(self, line: str) -> None:
        """Print a line, unless logger.progress = none."""
        if self.config.logger.progress != "none":
            print(printable(line), flush=True)

    def finish(self, status: str, error: str = "") -> None:
        """Write the summary, and the ordered file if it is wanted and all rows are done."""
        more = {"output": str(self.output.path), **({"error": error} if error else {})}
        if status == "finished" and self.config.generate.ordered and not (self.directory.root / MERGED).exists():
            merge(self.directory.root, None)
        self._write_summary(status, **more)
        self.tell(f"{status}: {len(self.output.counts.done)} of {self.progress.total} responses in {self.output.path}")


Opened = tuple[OutputFile, PendingRows, JobProgress]


def answer_rows(
    config: Config, root: Path, ranks: RankMap, launcher: Launcher, opened: Callable[[RunDirectory], Opened]
) -> int:
    """Answer the rows that are left with engines of `config`, in `root`, and return the exit code.

    `opened` is called once no other process can use the directory. When this returns, no engine is left, and every row
    that was answered is in the output.
    """
    directory, continuation = RunDirectory(root), continuation_of(config.slurm, root, os.environ)
    end, lead_s = continuation.end_time(), config.slurm.signal_lead_s
    with occupied(directory, node_name(), end, lead_s):
        with run_directory_kept(directory.root):
            output, pending, progress = opened(directory)
            directory.config.write_text(dump_toml(config), encoding="utf-8")
        job = GenerateJob(config, directory, ranks, launcher, output, pending, progress)
        try:
            return lead(job, directory, end, lead_s, continuation)
        finally:
            with contextlib.suppress(OSError):
                output.close()
