"""Find the files of a data set: one file, several by a pattern, or a directory of the library `datasets`."""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path

from slurm_rlhf.config.hub import is_hub_name
from slurm_rlhf.errors import DataError

WHAT = "a file or directory of prompts (JSONL, CSV, Parquet or Arrow)"
COLUMNAR = (".parquet", ".arrow")
"""Formats that pyarrow reads."""
FORMATS = (".jsonl", ".json", ".csv", *COLUMNAR)
"""Formats of a directory's files. A single file that has none of these endings is read as JSONL."""
_PART = re.compile(r"(.+?)-\d{5}-of-\d{5}(-\w+)?")
"""Name of a part of a data set on the hub: its split, its number, and the number of all."""


def data_files(path: Path | str) -> list[Path]:
    """List the files whose rows, one after the other, are the data set `path`.

    A directory is what `datasets` saves (`save_to_disk`), or holds files of one format and one split, as those of the
    hub do. Raises DataError for a path without such files: what it is, and what to write instead.
    """
    place = Path(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        return _directory(place)
    if found := sorted(glob.glob(str(path))):
        return [file for each in found for file in data_files(each)]
    if len(place.parts) > 3 and is_hub_name(name := "/".join(place.parts[-2:])) and not place.parent.exists():
        raise DataError(
            f"no such file: {place}. If {name} is a data set of the Hugging Face hub: `hf download {name} --repo-type "
            "dataset --local-dir DIR` where there is a network, and name a file of DIR"
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
