"""trackio: a SQLite database in the run directory, or a Space of Hugging Face's hub."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from slurm_rlhf.observe.samples import Sample
from slurm_rlhf.observe.trackers.sink import COLUMNS, TrackedRun, grouped, table_row


class TrackioSink:
    """Implements `Sink`. trackio knows a run by its name, so the id is a part of it."""

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run

    def open(self) -> str:
        tracked = self._tracked
        os.environ["TRACKIO_DIR"] = tracked.directory  # read when trackio is imported
        space = os.environ.get("TRACKIO_SPACE_ID", "")
        if not tracked.online:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        import trackio

        trackio.init(
            project=tracked.project,
            name=f"{tracked.name}-{tracked.id}",
            config=tracked.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if tracked.online and space:
            return f"trackio: https://huggingface.co/spaces/{space}"
        place, project = shlex.quote(tracked.directory), shlex.quote(tracked.project)
        return (
            f"trackio: TRACKIO_DIR={place} trackio show --project {project}; from a node with a network: "
            f"TRACKIO_DIR={place} trackio sync --project {project} --space-id USER/SPACE"
        )

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        import trackio

        trackio.log(grouped(metrics), step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        import trackio

        rows = [table_row(sample) for sample in samples]
        trackio.log({"samples": trackio.Table(columns=list(COLUMNS), data=rows)}, step=step)

    def close(self, failed: bool) -> None:
        import trackio

        trackio.finish()
