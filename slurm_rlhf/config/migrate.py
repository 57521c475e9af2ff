"""Translate a command of OpenRLHF into a TOML file of keys here. Pure: text in, text out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from slurm_rlhf.config.keys import INTERVALS, VALUES, Key, all_keys, key_of, meaning, nearest, tables
from slurm_rlhf.config.text import BadValue, from_text, split_overrides, toml_value
from slurm_rlhf.errors import ConfigError

PROGRAM = "openrlhf.cli.train_ppo_ray"


@dataclass(slots=True)
class Translation:
    """Holds what a command says, sorted."""

    values: dict[str, object] = field(default_factory=dict)  # key -> value
    flags: dict[str, str] = field(default_factory=dict)  # key -> the flag as it was written
    left_out: list[str] = field(default_factory=list)  # a sentence for each flag without a key

    def toml(self) -> str:
        """Write the file: the keys by group, OpenRLHF's own defaults as comments, what was left out."""
        lines = ["# Translated from a command of OpenRLHF. `slurm-rlhf check FILE.toml` reads all that it names.", ""]
        for group, keys in self._groups():
            lines += [f"[{group}]"] if group else []
            for key in keys:
                setting = f"{key.name.removeprefix(f'{group}.')} = {toml_value(self.values[key.name])}"
                flag = self.flags[key.name]
                lines.append(setting if flag == key.name else f"{setting}  # --{flag}")
            lines.append("")
        defaults = {name: value for name, value in tables()["openrlhf_defaults"].items() if name not in self.values}
        if defaults:
            lines.append(
                "# OpenRLHF's defaults that differ here. To keep one, give it on the command line or move it up:"
            )
            lines += [f"#   {name} = {toml_value(value)}" for name, value in defaults.items()]
            lines.append("")
        if self.left_out:
            lines += ["# Left out:", *(f"#   {sentence}" for sentence in self.left_out), ""]
        return "\n".join(lines).rstrip() + "\n"

    def _groups(self) -> Iterator[tuple[str, list[Key]]]:
        chosen = [key for key in all_keys().values() if key.name in self.values]
        for group in dict.fromkeys(key.group for key in chosen):
            yield group, [key for key in chosen if key.group == group]


def translate(command: str) -> Translation:
    """Read the flags of `command`, a line or a whole shell script. Raises ConfigError where it has none."""
    found = Translation()
    for name, words in split_overrides(_flags(command))[0]:
        key = key_of(name)
        written = " ".join([f"--{name}", *words])
        if key is None:
            near = f"unknown; near it: {', '.join(nearest(name)) or 'nothing'}"
            found.left_out.append(f"{written}: {meaning(name) or near}")
        elif key.name in found.values:
            found.left_out.append(f"{written}: --{found.flags[key.name]} says {key.name} already")
        else:
            _take(found, key, name, words, written)
    return found


def _take(found: Translation, key: Key, name: str, words: list[str], written: str) -> None:
    if key.name in INTERVALS and words == ["-1"]:
        words = ["0"]
    values = VALUES.get(key.name, {})
    words = [values.get(word.lower(), word) for word in words or (["true"] if "true" in values else [])]
    if any("$" in word for word in words):
        found.left_out.append(f"{written}: a variable of the shell; set {key.name} yourself")
        return
    try:
        value = from_text(key, words)
    except BadValue as error:
        found.left_out.append(f"{written}: {error}")
        return
    found.values[key.name], found.flags[key.name] = value, name


def _flags(command: str) -> list[str]:
    """Cut off what starts the program: ray, deepspeed, python; and what the shell does behind it."""
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"the command cannot be read as a shell would: {error}") from None
    program = [place for place, word in enumerate(words) if word.endswith((PROGRAM, "train_ppo_ray.py"))]
    flags = words[program[-1] + 1 :] if program else words
    while flags and not flags[0].startswith("--"):
        flags = flags[1:]
    ends = (place for place, word in enumerate(flags) if word in ("|", "&&", ";", "&", ">", "2>&1"))
    flags = flags[: next(ends, len(flags))]
    if not flags:
        raise ConfigError(f"no flag in the command: quote it whole, as in 'python3 -m {PROGRAM} --pretrain ...'")
    return flags
