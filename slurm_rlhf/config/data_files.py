"""Find the files of a data set: one file, several by a pattern, or a directory of the library `datasets`.

Several data sets are joined by commas. What `data.map` and `data.filter` say is read here, too.
"""

from __future__ import annotations

import glob
import json
import os
import re
from pathlib import Path

from slurm_rlhf.config.hub import remote_name
from slurm_rlhf.errors import DataError

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
