"""Find the files of a data set, and compare what models and data sets hold.

A data set is one file, several by a pattern, or a directory of the library `datasets`; several are joined by commas.
What `data.map` and `data.filter` say is read here, too. Contents are compared by hashes, tokenizers token by token.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from slurm_rlhf.config.hub import remote_name
from slurm_rlhf.config.model_directory import require_tokenizer
from slurm_rlhf.errors import DataError, ModelError

WHAT = "a file or directory of prompts (JSONL, CSV, Parquet or Arrow)"
COLUMNAR = (".parquet", ".arrow")
"""Formats that pyarrow reads."""
FORMATS = (".jsonl", ".json", ".csv", *COLUMNAR)
"""Formats of a directory's files. A single file that has none of these endings is read as JSONL."""
_PART = re.compile(r"(.+?)-\d{5}-of-\d{5}(-\w+)?")
"""Name of a part of a data set on the hub: its split, its number, and the number of all."""


_CONDITION = re.compile(r"\s*([^<>=!]*[^<>=!\s])\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*", re.DOTALL)


def condition(text: str) -> tuple[str, str, str] | None:
    """Read an entry of data.filter or data.map: the column, =, !=, <, <=, > or >=, and the text behind it.

    None: it is none, as where a number is needed behind < and is not there.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        return None
    column, sign, value = found.groups()
    if sign[0] in "<>":
        try:
            float(value)
        except ValueError:
            return None
    return column, sign, value


def parts(path: Path | str) -> list[str]:
    """Return the data sets that `path` joins by commas; a comma in the name of a file that is there joins none."""
    return [str(path)] if os.path.exists(path) else [part.strip() for part in str(path).split(",")]


def data_files(path: Path | str) -> list[Path]:
    """List the files whose rows, one after the other, are the data set `path`, or the several that it joins.

    A directory is what `datasets` saves (`save_to_disk`), or holds files of one format and one split, as those of the
    hub do. Raises DataError for a path without such files: what it is, and what to write instead.
    """
    if len(several := parts(path)) > 1:
        return [file for part in several for file in data_files(part)]
    place = Path(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        return _directory(place)
    if found := sorted(glob.glob(str(path))):
        return [file for each in found for file in data_files(each)]
    if name := remote_name(str(place)):
        raise DataError(
            f"no such file: {place}. If {name} is a data set of the Hugging Face hub: `slurm-rlhf prefetch FILE.toml` "
            "downloads it where there is a network, as on a login node, and prints the line for the file"
        )
    raise DataError(f"no such file: {place}")


def _directory(place: Path) -> list[Path]:
    if (place / "dataset_dict.json").is_file():
        splits = [each.name for each in sorted(place.iterdir()) if (each / "state.json").is_file()]
        raise DataError(f"{place}: holds the splits {', '.join(splits)}: name one, {place / (splits or ['SPLIT'])[0]}")
    if (place / "state.json").is_file():
        return _saved(place)
    files = [file for file in sorted(place.iterdir()) if file.suffix in FORMATS and file.is_file()]
    if not files and (place / "data").is_dir():
        return _directory(place / "data")
    if not files:
        raise DataError(f"{place}: a directory without files of rows ({', '.join(FORMATS)})")
    kinds = sorted({file.suffix for file in files})
    if len(kinds) > 1:
        raise DataError(f"{place}: holds files of several formats ({', '.join(kinds)}): name those of one, *{kinds[0]}")
    splits = sorted({part[1] if (part := _PART.fullmatch(file.stem)) else file.stem for file in files})
    if len(splits) > 1:
        raise DataError(
            f"{place}: holds several splits ({', '.join(splits)}): name the files of one, "
            f"{place / f'{splits[-1]}*{kinds[0]}'}"
        )
    return files


def _saved(place: Path) -> list[Path]:
    """List the files of a data set that `datasets` has saved. Source: `datasets`, `Dataset.save_to_disk`."""
    try:
        state = json.loads((place / "state.json").read_text(encoding="utf-8"))
        return [place / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{place / 'state.json'}: not that of a saved data set: {error}") from None


_PIECES = 256
"""Number of pieces of a file of weights that are compared, at even distances: training changes all of them, and to read
a whole large model takes minutes."""
_PIECE = 1 << 14
"""Bytes of a piece."""


def model_contents(model: Path) -> str:
    """Return a hash of config.json and, of each file of weights, its name, its size and `_PIECES` pieces."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted([model / "config.json", *model.glob("*.safetensors"), *model.glob("pytorch_model*.bin")]):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(size // _PIECES, _PIECE)):
                file.seek(place)
                found.update(file.read(_PIECE))
    return found.hexdigest()


def data_contents(path: Path | str) -> str:
    """Return the hashes of the files of a data set, of every byte. Raises DataError, OSError."""
    found = []
    for file in data_files(path):
        with file.open("rb") as opened:
            found.append(hashlib.file_digest(opened, "blake2b").hexdigest())
    return " ".join(found)


def check_same_tokenizer(key: str, path: str, actor: str, remedy: str) -> None:
    """Check that the model of `key` in `path` reads the tokens of the `actor`. Raises ModelError with the `remedy`."""
    difference = _difference(require_tokenizer(Path(path)), require_tokenizer(Path(actor)))
    if difference:
        raise ModelError(
            f"{key}: {path} has another tokenizer than actor.model_name_or_path ({difference}), and responses are "
            f"scored as the tokens that were sampled: {remedy}"
        )


def _difference(file: Path, other: Path) -> str:
    """Return the first token that two files tokenizer.json number differently; empty if there is none."""
    if file.read_bytes() == other.read_bytes():
        return ""
    theirs, ours = _tokens(file), _tokens(other)
    for token in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token) != ours.get(token):
            return f"token {token!r} is {theirs.get(token, 'missing')} there and {ours.get(token, 'missing')} here"
    return ""


def _tokens(file: Path) -> dict[str, int]:
    """Return the id of each token, including added tokens."""
    try:
        body: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        vocab = body["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [token, score], the id is the place
            vocab = {entry[0]: index for index, entry in enumerate(vocab)}
        return {**vocab, **{added["content"]: added["id"] for added in body.get("added_tokens", [])}}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{file}: not a tokenizer that can be read: {error}") from None
