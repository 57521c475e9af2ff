"""Translate a script or a command of OpenRLHF into a TOML file of keys here. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from slurm_rlhf.config.keys import INTERVALS, VALUES, Key, all_keys, changed, key_of, meaning, nearest, tables
from slurm_rlhf.config.rules import key_problems, rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.shell_script import commands
from slurm_rlhf.config.text import BadValue, from_text, listed, split_overrides, toml_value
from slurm_rlhf.errors import ConfigError

PROGRAM = "openrlhf.cli.train_ppo_ray"
PROGRAMS = {"train_ppo_ray": "train", "train_sft": "sft", "train_rm": "rm", "train_dpo": "dpo"}
"""Program of OpenRLHF, as a module of openrlhf.cli or a file, -> the command here."""


@dataclass(slots=True)
class Translation:
    """Holds what a command says, sorted."""

    values: dict[str, object] = field(default_factory=dict)  # key -> value
    flags: dict[str, str] = field(default_factory=dict)  # key -> the flag as it was written
    left_out: list[str] = field(default_factory=list)  # a sentence for each flag without a key
    command: str = "train"  # the command that reads the file

    def toml(self) -> str:
        """Write the file: the keys by group, OpenRLHF's own defaults as comments, what was left out."""
        look = "check" if self.command == "train" else "data"
        lines = [
            f"# Translated from OpenRLHF, for `slurm-rlhf {self.command} FILE.toml`. What it names is read by",
            f"# `slurm-rlhf {look} FILE.toml`.",
            "",
        ]
        for group, keys in self._groups():
            lines += [f"[{group}]"] if group else []
            for key in keys:
                setting = f"{key.name.removeprefix(f'{group}.')} = {toml_value(self.values[key.name])}"
                flag = self.flags[key.name]
                lines.append(setting if flag == key.name else f"{setting}  # --{flag}")
            lines.append("")
        table = tables()["openrlhf_stages"]["defaults"].get(self.command) or tables()["openrlhf_defaults"]
        defaults = {name: value for name, value in table.items() if name in all_keys() and name not in self.values}
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


def translate(script: str, read: Mapping[str, Collection[str]] | None = None) -> Translation:
    """Read the flags of a line or a whole shell script. Variables and arrays that it assigns are followed.

    `read`: command -> the keys and groups that it reads; others are left out. Raises ConfigError for a script without
    a program of OpenRLHF that is known here.
    """
    command, flags = _program(script)
    found = Translation(command=command)
    own = _stage_flags(command) if command != "train" else {}
    written_as: dict[str, str] = {}  # key of a stage -> the flag that it was
    ours = [_renamed(word, own, written_as) for word in flags]
    for name, words in split_overrides(ours)[0]:
        key, given = key_of(name), written_as.get(name, name)
        written = " ".join([f"--{given}", *words])
        reason = tables()["openrlhf_stages"]["instead"].get(name, "") if own else ""
        if reason or key is None:
            near = f"unknown; near it: {', '.join(nearest(name)) or 'nothing'}"
            found.left_out.append(f"{written}: {reason or meaning(name) or near}")
        elif key.name in found.values:
            found.left_out.append(f"{written}: --{found.flags[key.name]} says {key.name} already")
        elif read and not listed(key, read[command]):
            found.left_out.append(f"{written}: `slurm-rlhf {command}` does not read {key.name}")
        else:
            _take(found, key, given, words, written)
    _leave_room(found)
    _fit(found)
    if not found.values and not found.left_out:
        raise ConfigError(f"no flag in the command: quote it whole, as in 'python3 -m {PROGRAM} --pretrain ...'")
    return found


def _leave_room(found: Translation) -> None:
    """Choose the longest response where OpenRLHF gives it what its prompt leaves, and the default here is too long."""
    name, most = "rollout.max_new_tokens", found.values.get("data.max_len")
    if (
        found.command == "train"
        and isinstance(most, int)
        and name not in found.values
        and most <= Config().rollout.max_new_tokens
    ):
        found.values[name], found.flags[name] = most // 2, name
        found.left_out.append(f"{name} is half of data.max_len: OpenRLHF gives a response what its prompt leaves")


def _fit(found: Translation) -> None:
    """Leave out what breaks a rule here, so that `check` finds none: words and switches first, then numbers."""
    problems = rule_problems if found.command == "train" else key_problems
    while said := list(problems(changed(Config(), found.values))):
        named = [key for key in sorted(found.values, key=said[0].rfind, reverse=True) if key in said[0]]
        named.sort(key=lambda name: all_keys()[name].kind in ("int", "float"))
        cures = (name for name in named if said[0] not in problems(changed(Config(), _without(found.values, name))))
        wrong = next(cures, None)
        if wrong is None:
            return  # a rule about what is not set here, which `check` tells
        found.left_out.append(f"--{found.flags.pop(wrong)} {toml_value(found.values.pop(wrong))}: {said[0]}")


def _without(values: Mapping[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in values.items() if key != name}


def _stage_flags(command: str) -> dict[str, str]:
    """Return the flags of a stage's program that are called otherwise here: name -> key."""
    return {name: key.format(stage=command) for name, key in tables()["openrlhf_stages"]["keys"].items()}


def _renamed(word: str, own: Mapping[str, str], written_as: dict[str, str]) -> str:
    name, equals, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or name not in own:
        return word
    written_as.setdefault(own[name], name)
    return f"--{own[name]}{equals}{value}"


def _program(script: str) -> tuple[str, list[str]]:
    """Find the program of OpenRLHF in a script: the command that does its work here, and the program's flags."""
    names = [*commands(script)]
    for words in names:
        for place, word in enumerate(words):
            if " " in word.strip() and any(program in word for program in PROGRAMS):
                return _program(word)  # bash -c "..."
            name = word.removesuffix(".py").rpartition("/")[2].rpartition(".")[2]
            if name in PROGRAMS and word.endswith((".py", f"openrlhf.cli.{name}")):
                return PROGRAMS[name], _from_flags(words[place + 1 :])
    if names and names[0][:1] and names[0][0].startswith("--"):
        return "train", names[0]
    raise ConfigError(
        "no command of OpenRLHF in it: migrate reads scripts that call openrlhf.cli." + ", ".join(PROGRAMS) + ", or "
        "their flags alone. The tables of `slurm-rlhf docs migration` have the keys of verl and TRL"
    )


def _from_flags(words: list[str]) -> list[str]:
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    return words[first:]


def _take(found: Translation, key: Key, name: str, words: list[str], written: str) -> None:
    if (key.name in INTERVALS or key.name.endswith((".save_steps", ".eval_steps"))) and words == ["-1"]:
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
