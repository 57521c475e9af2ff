"""Show what a run does and record it: metrics, events, samples, progress, status, timings, excerpts of logs.

What lives here: `trackers`, `sinks` (TensorBoard, W&B, trackio, MLflow), `run_log` (files of JSON lines: events,
samples), `run_status` (metrics.jsonl, summary.json, how far a run is), `progress` (the base class, a table row, plain
lines), `live` (a terminal), `timing` (phases, calls to ranks, idle GPUs), `log_tail` (why a process ended), `stacks`.

May import: the base modules and `config`. No torch. Nothing here may stop a run: a missing figure is a dash.

To add a progress display: a subclass of `progress.Progress`, and a line in `live.make_progress`.
"""
