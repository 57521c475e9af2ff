"""MLflow: a SQLite database and files in the run directory, or the server of MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.observe.samples import Sample, markdown_text
from slurm_rlhf.observe.trackers.sink import TrackedRun, grouped

TAG = "slurm_rlhf.run"
"""The tag that holds our id: MLflow gives ids of its own."""
_MOST_PARAMS, _MOST_METRICS = 100, 1000  # most parameters and metrics in a request
_LONGEST = 6000  # characters of a parameter's value


class MlflowSink:
    """Implements `Sink`, without MLflow's global state."""

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run
        self._client: Any = None
        self._id = ""

    def open(self) -> str:
        from mlflow import MlflowClient

        tracked, root = self._tracked, Path(self._tracked.directory)
        root.mkdir(parents=True, exist_ok=True)
        local = f"sqlite:///{root.resolve() / 'mlflow.db'}"
        server = os.environ.get("MLFLOW_TRACKING_URI", "") if tracked.online else ""
        self._client = client = MlflowClient(tracking_uri=server or local)
        experiment = self._experiment((root / "artifacts").resolve().as_uri() if not server else None)
        known = client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{tracked.id}'", max_results=1)
        run = known[0] if known else client.create_run(experiment, run_name=tracked.name, tags={TAG: tracked.id})
        self._id = run.info.run_id
        client.update_run(self._id, status="RUNNING")
        self._params({key: value for key, value in tracked.config.items() if key not in run.data.params})
        if server:
            return f"mlflow: run {self._id} on the server of MLFLOW_TRACKING_URI"
        return f"mlflow: mlflow ui --backend-store-uri {shlex.quote(local)}"

    def _experiment(self, artifacts: str | None) -> str:
        project = self._tracked.project
        known = self._client.get_experiment_by_name(project)
        if known is not None:
            return str(known.experiment_id)
        return str(self._client.create_experiment(project, artifact_location=artifacts))

    def _params(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, str(value)[:_LONGEST]) for key, value in config.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        made = [Metric(name, value, now, step) for name, value in grouped(metrics).items()]
        for start in range(0, len(made), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=made[start : start + _MOST_METRICS])

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        text = "\n\n".join(markdown_text(sample) for sample in samples)
        self._client.log_text(self._id, text, f"samples/step_{step:06d}.md")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
