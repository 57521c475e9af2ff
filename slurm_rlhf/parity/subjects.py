"""Say what is compared: directories and models of the hub; on which prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurm_rlhf.config.hub import download, is_hub_name
from slurm_rlhf.config.model_directory import check_architecture, check_length, check_model_directory, read_config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ConfigError, ModelError
from slurm_rlhf.records import I32


@dataclass(frozen=True, slots=True)
class Subject:
    """Names a model to compare."""

    name: str  # name that the user sees
    directory: str = ""  # empty if it is not compared
    architecture: str = ""  # class in config.json
    refused: str = ""  # why it is not compared
    failed: str = ""  # why it cannot be compared


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


TEMPERATURE = 0.9
NEW_TOKENS = 24
SAMPLES = 2
"""Responses to each prompt: the second one finds the prompt in the prefix cache."""

FEWEST = 16
"""Tokens of the text below."""

TEXT = """A cluster has a queue and every user of it knows two numbers: how long a job may run, and how long it waits.
When 7 people share 8 cards, the arithmetic is simple; with 300 people and 96 nodes it is a matter of policy. So the
scheduler keeps an account: who asked for what, who used how much, and who has waited since Monday. A job that names
its needs well, say 4 nodes for 90 minutes, slips into a gap that a careless one cannot fill. In the evening the gaps
are larger, and a patient program that saves its state, ends when it is told to, and begins again where it was, will
find 2 hours here and 3 hours there, until its work is done. """


def prompts(tokenizer: Tokenizer, max_len: int) -> list[I32]:
    """Cut prompts of different lengths out of a text, from one token to nearly as many as leave room for a response.

    Raises ModelError for a tokenizer that finds next to nothing in a text.
    """
    text = TEXT.replace("\n", " ")
    ids = tokenizer.encode(text)
    if len(ids) < FEWEST:
        raise ModelError(f"its tokenizer makes {len(ids)} tokens of an English text of {len(text)} characters")
    while len(ids) < max_len:
        text += text
        ids = tokenizer.encode(text)
    longest = max_len - NEW_TOKENS
    lengths = sorted({min(length, longest) for length in (1, 5, 17, 33, longest * 5 // 8, longest * 7 // 8)})
    return [np.array(ids[:length], dtype=np.int32) for length in lengths]
