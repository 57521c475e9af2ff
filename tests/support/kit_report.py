"""The acceptance kit's table, gpu_report.md and gpu_report.json: pure text from outcomes."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kit import FAILED, PASSED, SKIPPED, Outcome

WIDTH = 118
REHEARSED = "A REHEARSAL ON CPUs: gloo and shared memory in place of NCCL and CUDA IPC. No figure here is a GPU's."


def verdict(outcomes: Sequence[Outcome]) -> str:
    """`PASSED`, `FAILED` and the counts."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    word = "FAILED" if counts[FAILED] else "PASSED" if counts[PASSED] else "NOTHING WAS RUN"
    return f"{word}: {counts[PASSED]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped"


def table(outcomes: Sequence[Outcome], width: int = WIDTH) -> str:
    """One row per check; long figures go on in the next line."""
    first = max([len(outcome.name) for outcome in outcomes], default=5)
    head = f"{'check'.ljust(first)}  verdict  seconds  "
    lines = [f"{head}figure"]
    for outcome in outcomes:
        stated = textwrap.wrap(outcome.figure, width - len(head)) or [""]
        lines.append(f"{outcome.name.ljust(first)}  {outcome.verdict:7}  {outcome.seconds:7.1f}  {stated[0]}")
        lines += [" " * len(head) + line for line in stated[1:]]
    return "\n".join(lines)


def as_json(outcomes: Sequence[Outcome], machine: dict[str, Any], rehearsal: bool, seconds: float) -> dict[str, Any]:
    """The whole report for programs."""
    return {
        "rehearsal": rehearsal,
        "verdict": verdict(outcomes),
        "seconds": round(seconds, 1),
        "machine": machine,
        "checks": [asdict(outcome) for outcome in outcomes],
    }


def as_markdown(report: dict[str, Any]) -> str:
    """The same for people: to be attached to a bug report."""
    machine, checks = report["machine"], report["checks"]
    parts = ["# GPU report of slurm_rlhf", f"**{report['verdict']}**, {report['seconds']:.0f} s."]
    if report["rehearsal"]:
        parts.append(f"**{REHEARSED}**")
    rows = ["| check | what | verdict | seconds | figure, or why not |", "|---|---|---|---|---|"]
    for check in checks:
        cells = (check["name"], check["about"], check["verdict"], f"{check['seconds']:.1f}", check["figure"])
        rows.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    parts.append("\n".join(rows))
    parts += ["## Machine", "\n".join(_machine(machine))]
    if machine["topology"]:
        parts.append(f"```\n{machine['topology']}\n```")
    for check in checks:
        if check["log"]:
            parts.append(f"## Last lines of {check['name']}\n\n```\n{check['log'].replace('```', '')}\n```")
    return "\n\n".join(parts) + "\n"


def _machine(machine: dict[str, Any]) -> list[str]:
    gpus = Counter(f"{gpu['name']}, {gpu['memory_mib'] / 1024:.0f} GiB" for gpu in machine["gpus"])
    cards = "; ".join(f"{count} x {name}" for name, count in gpus.items()) or f"none ({machine['said']})"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    rows = {
        "GPUs": cards,
        "driver": f"{machine['driver'] or 'none'}, for CUDA {machine['cuda_of_driver'] or '?'}",
        "versions": versions,
        "interfaces": "; ".join(machine["interfaces"]) or "none but lo",
        "kernel, CPUs": f"{machine['kernel']}, {machine['cpus']}",
        "commit": machine["commit"] or "not a git checkout",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows.items())]


def write(directory: Path, report: dict[str, Any]) -> list[Path]:
    """gpu_report.md and gpu_report.json."""
    files = [directory / "gpu_report.md", directory / "gpu_report.json"]
    files[0].write_text(as_markdown(report), encoding="utf-8")
    files[1].write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return files


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
