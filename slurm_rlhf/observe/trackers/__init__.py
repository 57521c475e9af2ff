"""Send what a run measures to trackers: TensorBoard, Weights & Biases, trackio, MLflow (`logger.use`).

What lives here: `sink` (the protocol, and who the run is), one file per tracker, `process` (a tracker in a process of
its own, for the conductor), `__main__` (that process), `trackers` (all of a run, each guarded).

TensorBoard's events are a file of ours and are written by the conductor. The others are libraries with threads,
handlers of signals, servers and a network: each runs in a process of its own, so that nothing they do can hold or end
the run.

To add a tracker: a file with a class that has the methods of `sink.Sink`, a row in `config.check.PACKAGES` and in
`__main__.sink_of`, an extra in pyproject.toml.
"""
