"""Run `slurm-rlhf data FILE.toml`: show what the model will see of its data sets, on the terminal and as a page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.config.data_files import WHAT
from slurm_rlhf.config.load import joined, load_config
from slurm_rlhf.config.rules import key_problems
from slurm_rlhf.errors import ConfigError, printable
from slurm_rlhf.report.data_page import DataView, histogram, write_data_page
from slurm_rlhf.report.page import tokens_within

_WIDTH = 48  # characters of the longest bar
_ON_TERMINAL = 1200  # characters of a row
_LOSS, _READ, _PLAIN = "\x1b[30;42m", "\x1b[2m", "\x1b[0m"


def show_data(arguments: Arguments) -> int:
    """Print what the model will see of each data set, and write the page. Raises UserError."""
    config = load_config(arguments.files, arguments.overrides)
    if problems := list(key_problems(config)):
        raise ConfigError(joined(problems))
    output = Path(arguments.options["output"]).expanduser().absolute()
    if not output.parent.is_dir():
        raise ConfigError(f"--output={output}: there is no directory {output.parent}")
    from slurm_rlhf.stages.view import views

    found = list(views(config, arguments.options["rows"]))
    if not found:
        raise ConfigError(
            f"no data set is named: set data.prompt_dataset, or dataset of sft, rm or dpo, to {WHAT}; or "
            "data.reasoning_gym to names of tasks"
        )
    for view in found:
        for line in _lines(view, sys.stdout.isatty()):
            print(line)
    write_data_page(output, found)
    print(f"{output}: open it in a browser, here or after scp")
    return 0


def _lines(view: DataView, colour: bool) -> Iterator[str]:
    """Write a data set for the terminal; without colours, the tokens of the loss stand in [brackets]."""
    yield f"{view.key}: {view.path}"
    yield from (f"  {printable(line)}" for line in view.facts)
    yield from (f"  left out: {printable(line)}" for line in view.dropped)
    bars = histogram(view.lengths)
    for low, high, count in bars:
        name = str(low) if low == high else f"{low} to {high}"
        yield f"  {name:>16} {'█' * round(count / max(bar[2] for bar in bars) * _WIDTH)} {count}"
    for row in view.rows:
        count = tokens_within(row.tokens, _ON_TERMINAL)
        shown = [
            (printable(token.replace("\n", "↵")), loss)
            for token, loss in zip(row.tokens[:count], row.loss[:count], strict=True)
        ]
        tokens = (
            "".join(f"{_LOSS if loss else _READ}{token}{_PLAIN}│" for token, loss in shown)
            if colour
            else "│".join(f"[{token}]" if loss else token for token, loss in shown)
        )
        yield f"  {printable(row.title)}"
        yield f"    {tokens}{' ...' if count < row.length else ''}"
