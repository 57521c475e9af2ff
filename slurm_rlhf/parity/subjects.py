"""Say what is compared: directories, models of the Hugging Face hub, or tiny random models of known architectures."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_rlhf.config.architectures import COMPARED, REFUSED
from slurm_rlhf.config.hub import download, is_hub_name
from slurm_rlhf.config.model_directory import check_architecture, check_length, check_model_directory, read_config
from slurm_rlhf.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True)
class Subject:
    """Names a model to compare."""

    name: str  # what the user sees
    directory: str = ""  # of the model; empty: a tiny random one is made
    model_type: str = ""  # of the random one, a key of `random_models.ARCHITECTURES`
    architecture: str = ""  # class in config.json
    refused: str = ""  # why it is not compared
    failed: str = ""  # why it cannot be compared
    listed: bool = False  # as a part of the whole table


def known_architecture(name: str) -> Subject:
    """Look up a model_type or class of the project's table, such as gemma2 or Gemma2ForCausalLM.

    Raises ConfigError with the valid names.
    """
    for architecture, compared in COMPARED.items():
        if name.lower() in (architecture.lower(), compared.model_type):
            return Subject(architecture, model_type=compared.model_type, architecture=architecture)
    for architecture in REFUSED:
        if name == architecture or architecture.lower().startswith(f"{name.lower()}for"):
            return _refused(architecture)
    valid = [compared.model_type for compared in COMPARED.values()]
    near = difflib.get_close_matches(name, valid, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"--architecture={name} is not in the table of compared architectures{meant} (valid: {', '.join(valid)}). To "
        "compare any other one, give the directory of a model"
    )


def all_architectures() -> list[Subject]:
    """List the whole table: what was compared, and what is refused."""
    found = [*map(known_architecture, COMPARED), *map(_refused, REFUSED)]
    return [replace(subject, listed=True) for subject in found]


def _refused(architecture: str) -> Subject:
    return Subject(architecture, architecture=architecture, refused=REFUSED[architecture])


def model(name: str, max_len: int) -> Subject:
    """Look at the model that `name` is: a directory, or OWNER/NAME on the hub, which is downloaded if need be.

    A model that cannot be trained has `refused` set, one that the hub does not give `failed`. Raises ConfigError for a
    name that can be neither.
    """
    if Path(name).is_dir():
        directory = str(Path(name).absolute())
    elif is_hub_name(name):
        try:
            directory = download(name)
        except ModelError as error:
            return Subject(name, failed=str(error).removeprefix(f"{name}: "))
    else:
        raise ConfigError(
            f"{name}: no such directory, and no name of a model on the Hugging Face hub (OWNER/NAME): give one of them"
        )
    try:
        check_model_directory(name, directory, tokenizer=True)
        check_length(name, directory, max_len)
        check_architecture(name, directory, sampled_len=max_len)
    except ModelError as error:
        return Subject(name, directory, refused=str(error).removeprefix(f"{name}: "))
    names = read_config(name, Path(directory)).get("architectures") or [""]
    return Subject(name, directory, architecture=str(names[0]))
