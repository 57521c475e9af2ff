"""Run `slurm-rlhf data FILE.toml`, which shows what the model will see of its data sets, and `prefetch FILE.toml`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.load import joined, load_config
from slurm_rlhf.config.rules import key_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import toml_value
from slurm_rlhf.config.user_data import FORMATS, WANTED_FILES, WHAT, data_files, download, has_rows, parts, remote_name
from slurm_rlhf.errors import ConfigError, DataError, printable
from slurm_rlhf.report.page import DataView, histogram, tokens_within, write_data_page

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


_SHARD = re.compile(r"^\d+$|-.*")  # the end of a file's name, after the split

MODEL, DATA, KERNEL = "model", "data set", "kernel"
FILES = {MODEL: WANTED_FILES, DATA: [f"*{suffix}" for suffix in FORMATS], KERNEL: ["*"]}
"""Kind of repository -> patterns of its files that are downloaded."""


def prefetch(arguments: Arguments) -> int:
    """Download, and say what to write into the file. Raises ModelError where the hub does not answer."""
    found = list(dict.fromkeys(_named(load_config(arguments.files, arguments.overrides))))
    if not found:
        print("everything that the file names is on this machine, or is no name of the hub: nothing to download")
    for key, name, kind in found:
        print(f"{key}: downloading the {kind} {name}", flush=True)
        asked = (name, key, "dataset" if kind == DATA else "model", FILES[kind])
        place = Path(download(*asked))
        if kind == DATA and not any(map(has_rows, place.rglob("*"))):  # it has only archives, or a script
            place = Path(download(*asked, "refs/convert/parquet"))
        print(f"{key}: {name} is in {place}")
        for line in _to_write(key, place) if kind == DATA else ["the name stays as it is: it is found in the cache"]:
            print(f"  {line}")
    return 0


def _named(config: Config) -> Iterator[tuple[str, str, str]]:
    """Find (key, OWNER/NAME, kind of repository) of all that is not on this machine."""
    for key in all_keys().values():
        value = get(config, key.name)
        if key.name.endswith("model_name_or_path") and (name := _absent(value)):
            yield key.name, name, MODEL
        if key.kind == "path" and key.name.endswith("dataset"):
            yield from ((key.name, name, DATA) for part in parts(value) if (name := _absent(part)))
    yield from (("eval.datasets.path", name, DATA) for one in config.eval.datasets if (name := _absent(one.path)))
    if "/" in config.ds.attn_implementation:
        yield "ds.attn_implementation", config.ds.attn_implementation, KERNEL


def _absent(value: str) -> str:
    return "" if not value or Path(value).exists() else remote_name(value)


def _to_write(key: str, place: Path) -> Iterator[str]:
    """Write the line that names a downloaded data set in the file: its directory, or the files of each split."""
    try:
        data_files(place)
        names = [str(place)]
    except DataError:
        files = filter(has_rows, place.rglob("*"))
        names = sorted({str(file.parent / f"{_SHARD.sub('', file.stem)}*{file.suffix}") for file in files})
    group, _, leaf = key.rpartition(".")
    yield f"write into the file, in [{group}]{': one of' if len(names) > 1 else ''}"
    yield from (f"{leaf} = {toml_value(name)}" for name in names)
