"""Read a configuration from TOML and the command line. An unknown key is an error that names the nearest known one."""

from __future__ import annotations

import copy
import os
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slurm_rlhf.config import user_data
from slurm_rlhf.config.keys import (
    ENTRIES,
    Key,
    all_keys,
    begins_alias,
    entry_keys,
    get,
    groups,
    key_of,
    meaning,
    nearest,
    put,
)
from slurm_rlhf.config.ranges import URLS
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import EvalDataSet
from slurm_rlhf.config.schema_models import RewardPart
from slurm_rlhf.config.text import BadValue, flat, from_text, from_toml, split_overrides
from slurm_rlhf.config.user_data import parts
from slurm_rlhf.errors import ConfigError, cut

COMMAND_LINE = "the command line"
NOT_PATHS = {
    "resume": ("auto", "never"),
    "reward.remote_url": URLS,
    "reward.sources: remote_url": URLS,
    "env.path": URLS,
    "train.kernel_cache": ("auto", "none"),
}
"""Key of a path -> beginnings of values that are no path."""


GONE = {
    "generate.num_shards": "the job array says how many shards there are",
    "logger.print_samples": "samples.jsonl and the report show samples",
    "reward.shuffle": "nothing permutes rewards; a control experiment has a reward function that does",
    "sync.network_gbits": "every actor rank sends an equal part, or its shard, to all nodes of engines",
    "train.share_prompts": "every response has its prompt in its own row now",
}
"""Key of earlier versions, which config.toml of an old run may have -> what replaces it."""


def load_config(path: Path | str | Sequence[Path | str] | None, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of a run: defaults, then the TOML files, then the command line; the last value counts.

    Several files are layers: a recipe's algorithm, say, and over it the model, data and sizes of a file of yours.
    Paths become absolute: those of a file start at its directory, those of the command line at the working
    directory, `~` is the home. An empty `run_dir` becomes runs/<name of the last file> under the working directory.
    Names of OpenRLHF's flags are read as ours; a line on stderr says so.
    Raises ConfigError with every unknown key (and the nearest valid one), wrong type, and syntax error.
    """
    config = Config()
    problems: list[str] = []
    files = [Path(file) for file in ([] if path is None else [path] if isinstance(path, Path | str) else path)]
    for file in files:
        _apply_table(_Source(config, problems, str(file), file.parent), read_toml(file), "")
    _apply_overrides(_Source(config, problems, COMMAND_LINE, Path.cwd(), "--"), list(overrides))
    if problems:
        raise ConfigError(joined(problems))
    if files and not config.run_dir:
        config.run_dir = os.path.abspath(Path("runs") / files[-1].stem)
    return config


def settled(config: Config) -> Config:
    """Return a copy of a configuration that was made or changed in Python, with every path absolute.

    Raises ConfigError with every value that its key does not take.
    """
    copied, problems = copy.deepcopy(config), []
    for name, key in all_keys().items():
        try:
            put(copied, name, _resolved(key, from_toml(key, get(copied, name)), Path.cwd()))
        except BadValue as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(joined(problems))
    return copied


def joined(problems: list[str]) -> str:
    """Write one problem as it is, and several as a list."""
    if len(problems) == 1:
        return problems[0]
    return "\n  - ".join([f"{len(problems)} problems in the configuration:", *problems])


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))  # some editors put a byte order mark first
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file (a TOML file with the keys is needed)") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


@dataclass(slots=True)
class _Source:
    """Sets keys from one place, and remembers how each was spelled there."""

    config: Config
    problems: list[str]
    name: str
    base: Path  # directory where its relative paths start
    dashes: str = ""
    spelled: dict[str, str] = field(default_factory=dict)  # key -> as it stands in the source

    def wrong(self, problem: str) -> None:
        self.problems.append(f"{self.name}: {problem}")

    def put(self, name: str, read: Callable[[Key], Any]) -> None:
        """Set the key that `name` is, a key of ours or a flag of OpenRLHF, to what `read` makes of its value."""
        if name in GONE:
            print(f"note: {self.name}: {self.dashes}{name} is left out: {GONE[name]}. Remove the key.", file=sys.stderr)
            return
        key = key_of(name)
        if key is None:
            self.wrong(_unknown(name, self.dashes))
            return
        before = self.spelled.setdefault(key.name, name)
        if before != name:
            self.wrong(f"{self.dashes}{before} and {self.dashes}{name} are the same key, {key.name}: leave one out")
            return
        try:
            put(self.config, key.name, _resolved(key, read(key), self.base))
        except BadValue as error:
            self.wrong(f"{self.dashes}{error}" + (f" (as {self.dashes}{name})" if name != key.name else ""))
            return
        if name != key.name:
            print(f"note: {self.name}: {self.dashes}{name}, a name of OpenRLHF, is {key.name} here", file=sys.stderr)


def _apply_table(source: _Source, table: dict[str, Any], prefix: str) -> None:
    for word, value in table.items():
        name = prefix + word
        if name in groups() and not isinstance(value, dict):
            source.wrong(f"{name} is a group of keys, not a key: write [{name}] and its keys below")
        elif isinstance(value, dict) and (name in groups() or begins_alias(name)):
            _apply_table(source, value, name + ".")
        elif name in GONE or key_of(name):
            source.put(name, partial(from_toml, value=value))
        else:
            for leaf in flat({name: value}) or [name]:
                source.wrong(_unknown(leaf))


def _apply_overrides(source: _Source, overrides: list[str]) -> None:
    found, stray = split_overrides(overrides)
    if stray:
        source.wrong(f"{stray[0]!r} belongs to no key: overrides look like --train.seed=1")
    for name, words in found:
        if name in groups():
            source.wrong(f"--{name} is a group of keys, not a key: write --{name}.<key>=<value>")
        else:
            source.put(name, partial(from_text, words=words))


def _unknown(name: str, dashes: str = "") -> str:
    if meant := meaning(name):
        return f"unknown key {dashes}{name}: {meant}"
    near = " or ".join(dashes + key for key in nearest(name))
    asked = f"; did you mean {near}?" if near else ""
    return f"unknown key {dashes}{name}{asked} (`slurm-rlhf train --help` names all keys)"


NAME_MAX = 255  # bytes of a file's name, by POSIX and Linux


def _resolved(key: Key, value: Any, base: Path) -> Any:
    if key.kind in ("path", "list[path]"):
        for name in re.split("[/,]", value if isinstance(value, str) else "/".join(value)):
            if len(name.encode(errors="surrogatepass")) > NAME_MAX:
                said = f"{key.name}: {cut(name, 40)!r} names no file: names have at most {NAME_MAX} bytes"
                raise BadValue(key, name, said)
    if key.kind == "list[path]":
        return [os.path.abspath(base / Path(item).expanduser()) for item in value]
    if key.kind in ENTRIES:
        return [_resolved_entry(key, entry, base) for entry in value]
    if key.kind != "path" or not value or value.startswith(NOT_PATHS.get(key.name, ())):
        return value
    if key.name in user_data.KEYS and (model := user_data.named(value, base)):
        return model
    whole = base / Path(value).expanduser()
    several = parts(value) if key.name.endswith("dataset") and not os.path.exists(whole) else [value]
    return ",".join(os.path.abspath(base / Path(part).expanduser()) for part in several)


def _resolved_entry(key: Key, entry: EvalDataSet | RewardPart, base: Path) -> EvalDataSet | RewardPart:
    found = replace(
        entry, **{name: _resolved(one, getattr(entry, name), base) for name, one in entry_keys(key).items()}
    )
    if isinstance(found, RewardPart) and found.preset == "json_schema" and found.preset_value:
        found.preset_value = os.path.abspath(base / Path(found.preset_value).expanduser())
    return found
