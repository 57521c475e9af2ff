"""What the benches share: their words, a model where none is given, and how a comparison is printed."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.config.load import joined, load_config
from slurm_rlhf.config.rules import out_of_range
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """A whole number of the bench itself."""

    default: int
    about: str


COMMON_OPTIONS = {
    "repeats": Option(5, "repetitions of each side, after one that does not count"),
    "threads": Option(max(1, len(os.sched_getaffinity(0))), "CPU threads of a step"),
    "hidden": Option(256, "hidden size of the random model, a multiple of 64 and at least 64"),
    "layers": Option(4, "its layers"),
    "vocab": Option(8192, "its tokens, at least 258"),
}
MODEL_INTRO = (
    "Without actor.model_name_or_path a Qwen2 with random weights is made for the bench and removed afterwards."
)


@dataclass(frozen=True, slots=True)
class BenchWords:
    """The words of a bench, sorted."""

    config: Config
    options: dict[str, int]
    json: bool


def read(words: list[str], options: Mapping[str, Option], defaults: list[str], usage: str) -> BenchWords:
    """[FILE.toml], `--option=number`, `--json`, and keys; `defaults` are keys where no file is given.

    Raises ConfigError for a value that is no whole number of at least 1, and what `load_config` raises.
    """
    values = {name: option.default for name, option in options.items()}
    rest: list[str] = []
    left = iter(word for word in words if word != "--json")
    for word in left:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in options:
            rest.append(word)
            continue
        text = value if equals else next(left, "")
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"--{name} takes a whole number of at least 1, got {text!r}\n{usage}")
        values[name] = int(text)
    file = rest.pop(0) if rest and not rest[0].startswith("-") else None
    config = load_config(file, rest if file else [*defaults, *rest])
    if problems := list(out_of_range(config)):
        raise ConfigError(joined(problems))
    return BenchWords(config, values, "--json" in words)


@contextmanager
def model_of(words: BenchWords, mean_response: int) -> Iterator[Config]:
    """The configuration with a model: the one it names, or a random one for as long as the block runs.

    What libraries print meanwhile goes to standard error: standard output is the result's.
    """
    with contextlib.redirect_stdout(sys.stderr), _model(words, mean_response) as config:
        yield config


@contextmanager
def _model(words: BenchWords, mean_response: int) -> Iterator[Config]:
    config, options = words.config, words.options
    # Before torch is imported: that is when it counts.
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    if config.actor.model_name_or_path:
        yield config
        return
    if options["hidden"] % 64 or options["vocab"] < 258:
        raise ConfigError("--hidden takes a multiple of 64, --vocab at least 258")
    from slurm_rlhf.training.random_model import ModelSize, make_random_model

    with tempfile.TemporaryDirectory(prefix="slurm-rlhf-bench-") as scratch:
        size = ModelSize(options["hidden"], options["layers"], options["vocab"], config.data.max_len)
        config.actor.model_name_or_path = str(make_random_model(Path(scratch) / "model", size, mean_response))
        yield config


def page(usage: str, about: str, options: Mapping[str, Option]) -> str:
    """A bench's part of the help."""
    width = max(map(len, options))
    listed = [f"  --{name.ljust(width)}  {option.about} [{option.default}]" for name, option in options.items()]
    return "\n".join([usage, "", about, "", *listed, f"  --{'json'.ljust(width)}  print one JSON object", ""])


def table(rows: Mapping[str, Mapping[str, Any]], unit: str) -> str:
    """Both sides of each comparison, their ratio, and the load they ran under."""
    width = max(map(len, rows))
    lines = [f"{unit.ljust(width)}  {'slurm-rlhf':>10}  {'bare':>10}  {'ratio':>6}  {'by CPU time':>11}  load"]
    lines += [
        f"{name.ljust(width)}  {row['ours']:10.0f}  {row['bare']:10.0f}  {row['ratio']:6.3f}  {row['cpu_ratio']:11.3f}"
        f"  {row['load']:.1f}"
        for name, row in rows.items()
    ]
    return "\n".join(lines)
