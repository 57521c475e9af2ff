"""Run `slurm-rlhf campaign`: break small runs on this machine, and tell what each fault did."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_rlhf.cli.main import Command, unknown
from slurm_rlhf.errors import ConfigError, printable

if TYPE_CHECKING:
    from slurm_rlhf.campaign.faults import Fault
    from slurm_rlhf.campaign.session import Start
    from slurm_rlhf.campaign.verdicts import Row

USAGE = "usage: slurm-rlhf campaign [--faults=N] [--seed=N] [--only=WORDS] [--storm=STEPS] [--out=DIR] [--list]"
OPTIONS = {
    "faults N": "how many, drawn so that each kind, target and phase comes before any comes twice [60]",
    "seed N": "of the drawing, and of when in its phase a fault strikes [0]",
    "only WORDS": "only faults whose names match this regular expression, as --list shows them",
    "storm STEPS": "one run of so many steps instead, of which some process is killed every 10 s",
    "out DIR": "a new directory for the runs, campaign.json and campaign.html [campaign]",
    "list": "show the faults that would be drawn, and start nothing",
}

EVERY_S = 10.0
"""Between the kills of a storm."""


def run(words: list[str]) -> int:
    """Draw faults, run them, write the table. Returns 1 when a fault was not borne as it should be.

    Raises ConfigError for an option that is none, and for a directory that holds something.
    """
    given = _options(words)
    from slurm_rlhf.campaign.draw import draw, runnable
    from slurm_rlhf.campaign.faults import NEEDS, all_faults, named
    from slurm_rlhf.campaign.files import disks_here
    from slurm_rlhf.campaign.result import PAGE, Campaign, left_out

    seed, most = _number(given, "seed", 0), _number(given, "faults", 60)
    try:
        chosen = named(all_faults(), given.get("only", ""))
    except re.error as error:
        raise ConfigError(f"--only={given['only']}: no regular expression: {error}") from None
    out = Path(given.get("out", "campaign")).absolute()
    can, cannot = runnable(chosen, disks_here())
    drawn, steps = draw(can, most, seed), _number(given, "storm", 0)
    if "list" in given:
        print("\n".join([*(fault.name for fault in drawn), *(f"{one.name} ({NEEDS[one.needs]})" for one in cannot)]))
        return 0
    if not drawn:
        raise ConfigError(f"--only={given.get('only')}: no fault that this machine can run has such a name (--list)")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out={out} holds something already: give a new directory")
    began = time.monotonic()
    rows: list[Row] = []
    # As Ctrl-C: what is running is ended first, and small disks are unmounted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for row in _storm(out, steps, seed) if steps else _rows(out, drawn, seed):
        rows.append(row)
        told = "; ".join(row.problems) or f"{row.outcome}{f', {row.said}' if row.said else ''}"
        print(f"{'ok   ' if row.good else 'WRONG'} {row.fault}: {printable(told)}", flush=True)
        Campaign(seed, rows, left_out(cannot, NEEDS), time.monotonic() - began, _timeouts()).write(out)
    campaign = Campaign(seed, rows, left_out(cannot, NEEDS), time.monotonic() - began, _timeouts())
    campaign.write(out)
    print("\n".join([*campaign.summary(), f"the table is {out / PAGE}"]))
    return 0 if campaign.good else 1


def _rows(out: Path, drawn: Sequence[Fault], seed: int) -> Iterator[Row]:
    from slurm_rlhf.campaign.leader import Leader

    return Leader(out, _start(out), seed, _note).run(drawn)


def _storm(out: Path, steps: int, seed: int) -> Iterator[Row]:
    from slurm_rlhf.campaign.storm import Storm

    yield Storm(out, _start(out), seed, steps, EVERY_S, _note).run()


def _start(out: Path) -> Start:
    from slurm_rlhf.campaign.session import Command as Process

    out.mkdir(parents=True, exist_ok=True)
    number = count()
    return lambda words: Process(words, out / f"output.{next(number)}.log")


def _note(text: str) -> None:
    print(text, flush=True)


def _timeouts() -> str:
    from slurm_rlhf.campaign.workload import CONFIG

    table = [f"{key} = {value}" for key, value in CONFIG.items() if key.startswith("timeout.")]
    return f"Time-outs of these runs, in seconds: {', '.join(table)}."


def _number(given: dict[str, str], name: str, usual: int) -> int:
    text = given.get(name, str(usual))
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(f"--{name}={text}: give a number, 0 or more")
    return int(text)


def _options(words: list[str]) -> dict[str, str]:
    known = {name.partition(" ")[0]: " " in name for name in OPTIONS}
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in known:
            raise ConfigError(f"unknown option {unknown(word, [f'--{one}' for one in known])}\n{USAGE}")
        if known[name] != bool(equals and value):
            raise ConfigError(f"--{name} {'takes a value: --' + name + '=...' if known[name] else 'takes no value'}")
        given[name] = value
    return given


COMMANDS = {
    "campaign": Command(
        USAGE,
        "Breaks small runs of a tiny random model on this machine's CPUs: kills and stops processes of each role in "
        "each phase, damages checkpoints, fills the disk or a quota, attacks the control port, holds up the reward "
        "function and collectives, and sets the clock. Tells for each fault how soon it was noticed, whether the "
        "culprit was named, how the run went on, whether its metrics are those of an undisturbed run, and "
        "what was left behind.",
        run,
        OPTIONS,
    ),
}
