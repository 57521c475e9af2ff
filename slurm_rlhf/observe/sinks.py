"""Write to one tracker, Weights & Biases, trackio or MLflow: `python -m slurm_rlhf.observe.sinks NAME`.

`observe.trackers` starts this process. Standard input has a JSON list per line: ["open", run],
["metrics", step, {...}], ["samples", step, [...]], ["close", failed]. If it ends without "close", the run was killed.
Standard output gets {"note": text} or {"failed": text}, once each; what the library prints goes to standard error, a
log file.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slurm_rlhf.config.check import without_secrets
from slurm_rlhf.observe.run_log import Sample, markdown_text


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Identify a run to a tracker."""

    id: str  # the same after a resume
    name: str
    project: str
    directory: str  # for the files of this tracker
    online: bool  # the tracker may use the network
    config: dict[str, Any]  # dotted key -> value


class Sink(Protocol):
    """Take what a run measures. `open` is called first, `close` last, all by one thread.

    Each may block and raise any exception: the caller then reports it once, and goes on without this tracker.
    """

    def open(self, run: TrackedRun) -> str:
        """Begin the run or go on with it; return how the user can look at it."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. An earlier step than the last one may come with further metrics."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write responses of a step, before its metrics."""

    def close(self, failed: bool) -> None:
        """Write everything, and end this part of the run."""


def grouped(metrics: Mapping[str, float]) -> dict[str, float]:
    """Put metrics without a group into the group `train/`."""
    return {name if "/" in name else f"train/{name}": float(value) for name, value in sorted(metrics.items())}


COLUMNS = ("step", "prompt", "response", "reward", "score", "label", "finish_reason")
"""Columns of a table of samples."""


def table_row(sample: Sample) -> list[Any]:
    """Return the cells of a sample, in the order of `COLUMNS`."""
    label = None if sample.label is None else str(sample.label)
    return [getattr(sample, name) if name != "label" else label for name in COLUMNS]


TAG = "slurm_rlhf.run"
"""Tag with our id of the run: MLflow uses ids of its own."""
_MOST_PARAMS, _MOST_METRICS = 100, 1000  # most parameters and metrics in a request
_LONGEST = 6000  # characters of a parameter's value


class MlflowSink:
    """Write a SQLite database and files in the run directory, or to the server of MLFLOW_TRACKING_URI."""

    def __init__(self) -> None:
        self._client: Any = None  # the functions of the package `mlflow` use global state
        self._id = ""

    def open(self, run: TrackedRun) -> str:
        from mlflow import MlflowClient

        root = Path(run.directory)
        root.mkdir(parents=True, exist_ok=True)
        local = f"sqlite:///{root.resolve() / 'mlflow.db'}"
        server = os.environ.get("MLFLOW_TRACKING_URI", "") if run.online else ""
        self._client = client = MlflowClient(tracking_uri=server or local)
        artifacts = None if server else (root / "artifacts").resolve().as_uri()
        known = client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else client.create_experiment(run.project, artifacts)
        runs = client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{run.id}'", max_results=1)
        made = runs[0] if runs else client.create_run(experiment, run_name=run.name, tags={TAG: run.id})
        self._id = made.info.run_id
        client.update_run(self._id, status="RUNNING")
        self._params({key: value for key, value in run.config.items() if key not in made.data.params})
        if server:
            return f"mlflow: run {self._id} on the server of MLFLOW_TRACKING_URI"
        return f"mlflow: mlflow ui --backend-store-uri {shlex.quote(local)}"

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


class TrackioSink:
    """Write a SQLite database in the run directory, or to a Space on the Hugging Face hub."""

    def open(self, run: TrackedRun) -> str:
        os.environ["TRACKIO_DIR"] = run.directory  # read when trackio is imported
        space = os.environ.get("TRACKIO_SPACE_ID", "")
        if not run.online:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        import trackio

        trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",  # the name identifies a run, so it contains the id
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if run.online and space:
            return f"trackio: https://huggingface.co/spaces/{space}"
        place, project = shlex.quote(run.directory), shlex.quote(run.project)
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


EVALUATION = "evaluation_step"
"""Axis of evaluations: W&B takes only ascending steps, and an evaluation may come later than further steps."""


class WandbSink:
    """Write offline files in the run directory, or to the server of `wandb login`.

    Each start of an offline run is a directory; their common id makes them one run.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._last = 0

    def open(self, run: TrackedRun) -> str:
        import wandb

        Path(run.directory).mkdir(parents=True, exist_ok=True)
        # The command line, the environment and the output of the process are left out: they may contain secrets.
        quiet = {"console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_meta": True}
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            dir=run.directory,
            mode="online" if run.online else "offline",
            resume="allow" if run.online else None,
            config=run.config,
            settings=wandb.Settings(**quiet, x_disable_stats=True, x_disable_machine_info=True),
        )
        self._run.define_metric("eval/*", step_metric=EVALUATION)
        self._run.define_metric("train/eval", step_metric=EVALUATION)
        if run.online:
            return f"wandb: {self._run.url}"
        place = shlex.quote(str(Path(run.directory, "wandb")))
        return f"wandb: offline; from a node with a network: wandb sync {place}/offline-run-*-{run.id}"

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        row: dict[str, Any] = grouped(metrics)
        if any(name.startswith("eval/") or name == "train/eval" for name in row):
            row[EVALUATION] = step
        self._last = max(step, self._last)  # the current step takes the metrics of an earlier one
        self._run.log(row, step=self._last)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[table_row(sample) for sample in samples])
        self._last = max(step, self._last)
        self._run.log({"samples": table}, step=self._last)

    def close(self, failed: bool) -> None:
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # ends the process of wandb


SINKS: dict[str, Callable[[], Sink]] = {"wandb": WandbSink, "trackio": TrackioSink, "mlflow": MlflowSink}
"""Name in `logger.use` -> sink; its library is imported when it opens."""


def main() -> int:
    """Serve one run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the conductor handles them, and then closes
    # Libraries print to standard error: standard output is for the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(kind: str, text: str) -> None:
        print(json.dumps({kind: without_secrets(text, os.environ)}), file=answers, flush=True)

    sink: Sink | None = None
    closed = False
    try:
        for line in sys.stdin:
            call, *given = json.loads(line)
            if call == "open":
                sink = SINKS[sys.argv[1]]()
                answer("note", sink.open(TrackedRun(**given[0])))
            elif sink is not None:
                closed = closed or call == "close"
                last = [Sample(**row) for row in given[-1]] if call == "samples" else given[-1]
                getattr(sink, call)(*given[:-1], last)
        if sink is not None and not closed:
            sink.close(True)
    except Exception as error:  # any error of a library
        first = next(iter(str(error).strip().splitlines()), "")
        answer("failed", f"{type(error).__name__}: {first}" if first else type(error).__name__)
        print(without_secrets(f"{type(error).__name__}: {error}", os.environ), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
