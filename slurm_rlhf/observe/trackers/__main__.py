"""A tracker in a process of its own: python -m slurm_rlhf.observe.trackers NAME.

Standard input brings a JSON list a line: ["open", run], ["metrics", step, {...}], ["samples", step, [...]],
["close", failed]; its end without "close" is a run that was killed. Standard output takes {"note": text} or
{"failed": text}, once each; what the library prints goes to standard error, a log file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from slurm_rlhf.config.check import without_secrets
from slurm_rlhf.observe.samples import Sample
from slurm_rlhf.observe.trackers.sink import Sink, TrackedRun


def sink_of(name: str, run: TrackedRun) -> Sink:
    """Make the sink that `logger.use` calls `name`; its library is imported when it opens."""
    if name == "wandb":
        from slurm_rlhf.observe.trackers.wandb import WandbSink

        return WandbSink(run)
    if name == "trackio":
        from slurm_rlhf.observe.trackers.trackio import TrackioSink

        return TrackioSink(run)
    if name == "mlflow":
        from slurm_rlhf.observe.trackers.mlflow import MlflowSink

        return MlflowSink(run)
    raise ValueError(f"no tracker {name!r}")


def main() -> int:
    """Serve one run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are the conductor's, which then closes
    # What libraries print does not get into the answers.
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
                sink = sink_of(sys.argv[1], TrackedRun(**given[0]))
                answer("note", sink.open())
            elif sink is not None:
                closed = closed or call == "close"
                _serve(sink, call, given)
        if sink is not None and not closed:
            sink.close(True)
    except Exception as error:  # whatever a library raises
        first = next(iter(str(error).strip().splitlines()), "")
        answer("failed", f"{type(error).__name__}: {first}" if first else type(error).__name__)
        print(without_secrets(f"{type(error).__name__}: {error}", os.environ), file=sys.stderr)
        return 1
    return 0


def _serve(sink: Sink, call: str, given: list[Any]) -> None:
    if call == "metrics":
        sink.metrics(*given)
    elif call == "samples":
        sink.samples(given[0], [Sample(**row) for row in given[1]])
    elif call == "close":
        sink.close(*given)


if __name__ == "__main__":
    sys.exit(main())
