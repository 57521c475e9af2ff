"""Run `slurm-rlhf bench NAME`: measure how fast a part of a run is on this machine.

The module `slurm_rlhf.bench.NAME` has `run_bench(options, config)` and `show(result)`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import Any

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.config.load import joined, load_config
from slurm_rlhf.config.rules import out_of_range
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError


def measure_part(arguments: Arguments) -> int:
    """Measure and print the result. Raises ConfigError, and what the bench raises."""
    config, options = _config(arguments), arguments.options
    if arguments.command.files:  # before torch is imported: it reads this once
        os.environ["OMP_NUM_THREADS"] = str(options.get("threads", len(os.sched_getaffinity(0))))
    # Libraries print to standard error meanwhile: standard output is for the result.
    with contextlib.redirect_stdout(sys.stderr):
        module = importlib.import_module(f"slurm_rlhf.bench.{arguments.command.name.removeprefix('bench ')}")
        result: dict[str, Any] = module.run_bench(options, config)
    print(json.dumps(result) if "json" in options else module.show(result))
    return 0


def _config(arguments: Arguments) -> Config:
    if not arguments.command.files:
        if arguments.words:
            raise arguments.error(f"{arguments.command.name} does not know {arguments.words[0]!r}")
        return Config()
    defaults = () if arguments.files else arguments.command.default_keys
    config = load_config(arguments.files or None, [*defaults, *arguments.overrides])
    if problems := list(out_of_range(config)):
        raise ConfigError(joined(problems))
    return config
