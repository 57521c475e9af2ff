"""Run `slurm-rlhf bench NAME`, which measures a part of a run, and `check-parity MODEL`, which compares log-probs.

The module `slurm_rlhf.bench.NAME` has `run_bench(options, config)` and `show(result)`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slurm_rlhf.cli.commands import Arguments, columns, unknown
from slurm_rlhf.config.load import joined, load_config
from slurm_rlhf.config.rules import out_of_range
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, printable

if TYPE_CHECKING:
    from slurm_rlhf.parity.verdicts import Line


def measure_part(arguments: Arguments) -> int:
    """Measure and print the result. Raises ConfigError, and what the bench raises."""
    config, options = _config(arguments), arguments.options
    if arguments.command.files:  # before torch is imported, which reads it once
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


def check_parity(arguments: Arguments) -> int:
    """Compare, and print the table; 1 if models differ, fail or are refused. Raises UserError."""
    from slurm_rlhf.parity.processes import compare
    from slurm_rlhf.parity.verdicts import AGREE, PRECISIONS, model, name_width

    if not arguments.words:
        raise arguments.error("check-parity: name a model")
    given = arguments.options
    precisions = [*dict.fromkeys(filter(None, given["precision"].split(",")))]
    for name in precisions:
        if name not in PRECISIONS:
            raise ConfigError(f"--precision: unknown {unknown(name, PRECISIONS)} (valid: {', '.join(PRECISIONS)})")
    subjects = [model(name, given["max_len"]) for name in dict.fromkeys(arguments.words)]
    found = compare(subjects, precisions, given["max_len"], given["timeout"])
    lines = _printed_as_json(found) if "json" in given else _printed(found, name_width(subjects))
    return int(any(line.verdict != AGREE for line in lines))


def _printed_as_json(found: Iterator[Line]) -> list[Line]:
    """Print one JSON object at the end."""
    lines = list(found)
    print(json.dumps({"lines": [line.to_json() for line in lines]}, allow_nan=False))
    return lines


def _printed(found: Iterator[Line], width: int) -> list[Line]:
    """Print lines as soon as they are known."""
    from slurm_rlhf.parity.verdicts import head, reasons, row, summary

    print(head(width), flush=True)
    lines: list[Line] = []
    for line in found:
        print(printable(row(line, width, first=not lines or lines[-1].model != line.model)), flush=True)
        lines.append(line)
    if why := reasons(lines, columns()):
        print(f"\n{printable(why)}")
    print(f"\n{summary(lines)}")
    return lines
