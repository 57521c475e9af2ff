"""Read a configuration from TOML and the command line. An unknown key is an error that names the nearest known one."""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.config.key_text import BadValue, from_text, from_toml, split_overrides
from slurm_rlhf.config.keys import Key, all_keys, get, groups, nearest, put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

COMMAND_LINE = "the command line"
NOT_PATHS = {
    "resume": ("auto", "never"),
    "reward.remote_url": ("http://", "https://"),
    "train.kernel_cache": ("auto", "none"),
}
"""Key of a path -> other words that it takes."""


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of a run: defaults, then the TOML file, then the command line; the last value counts.

    Paths become absolute: those of the file start at its directory, those of the command line at the working
    directory, `~` is the home. An empty `run_dir` becomes runs/<name of the file> under the working directory.
    Raises ConfigError with every unknown key (and the nearest valid one), wrong type, and syntax error.
    """
    config = Config()
    problems: list[str] = []
    if path is not None:
        file = Path(path)
        _apply_table(config, _read(file), "", file, problems)
    _apply_overrides(config, list(overrides), problems)
    if problems:
        raise ConfigError(joined(problems))
    if path is not None and not config.run_dir:
        config.run_dir = os.path.abspath(Path("runs") / Path(path).stem)
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


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))  # some editors put a byte order mark first
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file (a TOML file with the run's keys is needed)") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def _apply_table(config: Config, table: dict[str, Any], prefix: str, file: Path, problems: list[str]) -> None:
    for word, value in table.items():
        name = prefix + word
        if name in groups():
            if isinstance(value, dict):
                _apply_table(config, value, name + ".", file, problems)
            else:
                problems.append(f"{file}: {name} is a group of keys, not a key: write [{name}] and its keys below")
        elif name not in all_keys():
            unknown = [f"{name}.{inner}" for inner in value] if isinstance(value, dict) and value else [name]
            problems += [f"{file}: {_unknown(each)}" for each in unknown]
        else:
            key = all_keys()[name]
            try:
                put(config, name, _resolved(key, from_toml(key, value), file.parent))
            except BadValue as error:
                problems.append(f"{file}: {error}")


def _apply_overrides(config: Config, overrides: list[str], problems: list[str]) -> None:
    found, stray = split_overrides(overrides)
    if stray:
        problems.append(f"{COMMAND_LINE}: {stray[0]!r} belongs to no key: overrides look like --train.seed=1")
    for name, words in found:
        if name in groups():
            problems.append(f"{COMMAND_LINE}: --{name} is a group of keys, not a key: write --{name}.<key>=<value>")
        elif name not in all_keys():
            problems.append(f"{COMMAND_LINE}: {_unknown(name, '--')}")
        else:
            key = all_keys()[name]
            try:
                put(config, name, _resolved(key, from_text(key, words), Path.cwd()))
            except BadValue as error:
                problems.append(f"{COMMAND_LINE}: --{error}")


def _unknown(name: str, dashes: str = "") -> str:
    meant = " or ".join(dashes + key for key in nearest(name))
    return f"unknown key {dashes}{name}; did you mean {meant}? (`slurm-rlhf train --help` lists all keys)"


def _resolved(key: Key, value: Any, base: Path) -> Any:
    if key.kind == "list[path]":
        return [os.path.abspath(base / Path(item).expanduser()) for item in value]
    if key.kind != "path" or not value or value.startswith(NOT_PATHS.get(key.name, ())):
        return value
    return os.path.abspath(base / Path(value).expanduser())
