"""What a run needs of its accelerators, computed before anything starts. Pure: no torch, no I/O but config.json."""
