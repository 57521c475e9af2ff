"""What a run shows while it runs and leaves behind: metrics, events, progress, summary, the tails of logs."""
