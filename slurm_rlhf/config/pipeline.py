"""Read a pipeline: the stages of a TOML file, each a command of slurm-rlhf, and the directories of their output."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.config.contents import data_contents, model_contents
from slurm_rlhf.config.keys import Key, all_keys, get
from slurm_rlhf.config.load import load_config, read_toml
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.config.text import flat, listed, toml_value
from slurm_rlhf.errors import ConfigError, DataError, meant

TRAIN, EVAL, GENERATE = "train", "eval", "generate"
EVALUATED = "eval.json"
"""Name of the file with the figures of `eval`."""
TRAINING = (TRAIN, *STAGES)
"""Commands that train."""
COMMANDS = (*TRAINING, EVAL, GENERATE)
"""Commands that may be a stage."""
_TOP = {"run_dir": str, "sbatch": list, "setup": list, "stage": list}
_STAGE = {"name": str, "command": str, "files": list, "keys": dict, "sbatch": list}
_KINDS: dict[type, str] = {str: "a string", list: "a list of strings", dict: "a table"}
_NAME = re.compile(r"[A-Za-z0-9_]+")
_REFERENCE = re.compile(r"\{([A-Za-z0-9_]+)\}")
_WITHOUT = ("slurm.", "timeout.", "logger.", "cluster.", "run_dir", "resume", "preflight")
"""Beginnings of keys that do not change what a stage makes."""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Describes a stage: its command with all words, and its directory."""

    name: str
    command: str
    files: list[Path]
    words: list[str]  # --KEY=VALUE and options, references replaced
    directory: Path
    sbatch: list[str] = field(default_factory=list)  # options of its job

    @property
    def trains(self) -> bool:
        """Tell whether it is a stage of training on a data set, as sft."""
        return self.command in STAGES

    @property
    def model(self) -> Path:
        """Return the path that `{name}` stands for: the trained model; for `eval` and `generate`, the directory."""
        last = "model" if self.trains else "final" if self.command == TRAIN else ""
        return self.directory / last

    @property
    def record(self) -> Path:
        """Return the directory of its metrics."""
        return self.directory / "model.run" if self.trains else self.directory

    @property
    def made(self) -> bool:
        """Tell whether its output is there. An exit without an error does not say so: a stopped stage has one, too."""
        return (self.directory / EVALUATED if self.command == EVAL else self.model).exists()

    @property
    def output(self) -> list[str]:
        """Return the words that say where its files go."""
        if self.trains:
            return [f"--{self.command}.output_dir={self.model}"]
        return [f"--run_dir={self.directory}", *([f"--output={self.directory}"] if self.command == EVAL else [])]

    def option(self, name: str) -> str:
        """Return the value of an option of its command, empty without it."""
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"--{name}=")), "")

    def config(self) -> Config:
        """Read its configuration, without the options that its command takes. Raises ConfigError."""
        names = {"model", "output"} if self.command == EVAL else set()
        keys = [word for word in [*self.words, *self.output] if word[2:].partition("=")[0] not in names]
        return load_config(self.files, keys)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Describes a pipeline."""

    file: Path
    root: Path
    stages: list[PipelineStage]
    setup: list[str]  # shell lines before each job's command

    def hashes(self, read: Mapping[str, Collection[str]]) -> dict[str, str]:
        """Hash each stage: its keys, the contents of its inputs, and the stages before it. Raises UserError.

        `read`: command -> the keys and groups that it reads. Keys at their defaults do not count, so that a key that is
        new in this version changes nothing.
        """
        found: dict[str, str] = {}
        before = ""
        for stage in self.stages:
            digest = hashlib.blake2b(f"{before}\0{stage.command}".encode(), digest_size=16)
            config, keys = stage.config(), [key for key in all_keys().values() if listed(key, read[stage.command])]
            for key in keys:
                value = get(config, key.name)
                if value != key.default and not key.name.startswith(_WITHOUT):
                    digest.update(f"{key.name}={toml_value(value)}\0".encode())
            options = [word for word in stage.words if "." not in word.partition("=")[0]]
            digest.update("\0".join([*options, *self._inputs(config, keys)]).encode())
            before = found[stage.name] = digest.hexdigest()
        return found

    def foreseen(self) -> Iterator[tuple[PipelineStage, set[str]]]:
        """Yield each stage as it can be checked before any has run, and its keys that name models not made yet.

        Such a key names the model that the missing one is trained from, which has the same shape and tokenizer.
        """
        sources: dict[str, str] = {}
        for stage in self.stages:
            given = {name: value for name, _, value in (word.partition("=") for word in stage.words)}
            words = [f"{name}={sources.get(value, value)}" for name, value in given.items()]
            # The stage moves an output that was made with other keys aside when it runs.
            directory = self.root / f"{stage.name}.next" if stage.made else stage.directory
            seen = replace(stage, words=words, directory=directory)
            if (stage.trains or stage.command == TRAIN) and not stage.made:
                sources[str(stage.model)] = seen.config().actor.model_name_or_path
            yield seen, {name[2:] for name, value in given.items() if value in sources}

    def _inputs(self, config: Config, keys: Sequence[Key]) -> Iterator[str]:
        """Hash the files that these keys name, except those that the pipeline itself makes."""
        values = [get(config, key.name) for key in keys if key.kind in ("path", "list[path]")]
        values += [one.path for one in config.eval.datasets if any(key.name == "eval.datasets" for key in keys)]
        paths = [path for value in values for path in (value if isinstance(value, list) else [value]) if path]
        for path in dict.fromkeys(paths):
            if Path(path).is_relative_to(self.root):
                continue
            if (Path(path) / "config.json").exists():
                yield f"{path} {model_contents(Path(path))}"
                continue
            with suppress(DataError):  # an address, or what the stage itself will find missing
                yield f"{path} {data_contents(path)}"


def read_pipeline(file: Path) -> Pipeline:
    """Read a pipeline. Relative paths start at the directory of the file. Raises ConfigError."""
    file = file.absolute()
    table = read_toml(file)
    _check(str(file), table, _TOP)
    if not table.get("stage"):
        raise ConfigError(f"{file}: it has no stage: write [[stage]] with name, command and files")
    root = Path(os.path.abspath(file.parent / Path(table.get("run_dir") or f"runs/{file.stem}").expanduser()))
    stages: dict[str, PipelineStage] = {}
    for number, row in enumerate(table["stage"], 1):
        stage = _stage(f"{file}: stage {number}", row, root, file.parent, stages, table.get("sbatch", []))
        stages[stage.name] = stage
    return Pipeline(file, root, list(stages.values()), table.get("setup", []))


def _stage(
    where: str, row: Any, root: Path, base: Path, earlier: dict[str, PipelineStage], sbatch: list[str]
) -> PipelineStage:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a stage is a table: write [[stage]]")
    _check(where, row, _STAGE)
    name, command = row.get("name", ""), row.get("command", "")
    if not _NAME.fullmatch(name) or name in earlier:
        raise ConfigError(f"{where}: name = {name!r}: give it a name of its own, of letters, digits and _")
    if command not in COMMANDS:
        raise ConfigError(f"{where}: command = {command!r}{meant(command, COMMANDS)} (valid: {', '.join(COMMANDS)})")
    models = {one.name: str(one.model) for one in earlier.values()}
    words = []
    for key, value in flat(row.get("keys", {})).items():
        text = value if isinstance(value, str) else toml_value(value)
        for reference in _REFERENCE.findall(text):
            if reference not in models:
                known = ", ".join(models) or "none"
                raise ConfigError(f"{where}: {key} = {text!r}: no stage before it is called {reference!r} ({known})")
        words.append(f"--{key}={_REFERENCE.sub(lambda found: models[found[1]], text)}")
    files = [base / Path(each).expanduser() for each in row.get("files", [])]
    stage = PipelineStage(name, command, files, words, root / name, sbatch + row.get("sbatch", []))
    taken = {word.partition("=")[0] for word in stage.output} & {word.partition("=")[0] for word in words}
    if taken:
        raise ConfigError(f"{where}: {min(taken)[2:]}: the pipeline says where its stages write: leave it out")
    return stage


def _check(where: str, table: dict[str, Any], valid: Mapping[str, type]) -> None:
    for name, value in table.items():
        if name not in valid:
            raise ConfigError(f"{where}: unknown key {name}{meant(name, valid)} (valid: {', '.join(valid)})")
        texts = valid[name] is not list or name == "stage" or all(isinstance(each, str) for each in value)
        if not isinstance(value, valid[name]) or not texts:
            raise ConfigError(f"{where}: {name} takes {_KINDS[valid[name]]}, got {value!r}")
