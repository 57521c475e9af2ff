"""Show what a run does and record it: metrics, events, progress, status, timings, log excerpts.

What lives here: `metrics` (metrics.jsonl, TensorBoard's file), `trackers` (TensorBoard, W&B, trackio, MLflow),
`run_status` (summary.json, where a run stands and in which phase), `progress` (the base class, a table row, plain
lines), `live` (a terminal), `timing` (phases, idle GPUs), `log_tail` (why a process ended), and what the report shows:
`samples` (responses), `events` (stops, warnings), `spans` (calls to ranks), each a file of JSON lines (`jsonl`).

May import: the base modules and `config`. No torch. Nothing here may stop a run: what is missing is shown as a dash.

To add a progress display: a subclass of `progress.Progress`, and a line in `live.make_progress`.
"""
