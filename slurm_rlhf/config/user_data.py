"""Find what a user names: the files of a data set, and models, data sets and kernels of the Hugging Face hub.

A data set is one file, several by a pattern, or a directory of the library `datasets`; several are joined by commas.
What `data.map` and `data.filter` say is read here, too. A name of the hub, OWNER/NAME, is looked up in its cache, or
fetched where there is a network.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import get, put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import DataError, ModelError

KEYS = (
    "actor.model_name_or_path",
    "critic.model_name_or_path",
    "reward.model_name_or_path",
    "algo.distill.model_name_or_path",
)
"""Keys that take a name."""
WANTED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Files to download of a model; the hub has the same weights in other formats, too, which are left out."""
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(text: str) -> bool:
    """Return whether `text` has the form OWNER/NAME."""
    return _NAME.fullmatch(text) is not None


def remote_name(text: str) -> str:
    """Return OWNER/NAME if `text` is one, or a path that ends in one and has no such directory; else empty."""
    if is_hub_name(text):
        return text
    place = Path(text)
    name = "/".join(place.parts[-2:])
    return name if len(place.parts) > 3 and is_hub_name(name) and not place.parent.exists() else ""


def named(text: str, base: Path) -> str:
    """Return the directory of the cached model that `text` names, the name if it is not cached; empty for a path.

    A path counts first: where `base` has the directory OWNER, a missing OWNER/NAME is a typing error.
    """
    if not is_hub_name(text) or (base / text).exists() or (base / text).parent.exists():
        return ""
    found = cached(text.replace("/", "--"))
    return text if found is None else str(found)


def cached(folder: str) -> Path | None:
    """Find the model OWNER--NAME in the cache; None: it is not there, or was not downloaded to its end.

    Source of the layout: huggingface_hub, `constants.py`, `file_download.py` and `_tree_cache.py`.
    """
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    model = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{folder}"
    try:
        commit = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    try:
        listed = json.loads((model / "trees" / f"{commit}.json").read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        listed = []  # an earlier version has written the cache
    snapshot = model / "snapshots" / commit
    needed = ["config.json", *filter(_WEIGHTS.fullmatch, listed)]
    return snapshot if all((snapshot / name).exists() for name in needed) else None


def fetch_models(config: Config, say: Callable[[str], None]) -> None:
    """Download the models that are named and are not in the cache. Raises ModelError where the hub does not answer."""
    for key in KEYS:
        if is_hub_name(name := get(config, key)):
            say(f"{key}: {name} is not in the Hugging Face cache: downloading it")
            put(config, key, download(name, key))


def download(
    name: str, key: str = "", kind: str = "model", wanted: Sequence[str] = WANTED_FILES, revision: str = ""
) -> str:
    """Return the directory of a model (or `kind`: dataset) of the hub, with the `wanted` files, downloaded if need be.

    Raises ModelError.
    """
    from huggingface_hub import snapshot_download

    at: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        return str(snapshot_download(name, repo_type=kind, allow_patterns=list(wanted), etag_timeout=10, **at))
    except Exception as error:  # OSError, and the exceptions of three network libraries
        raise ModelError(f"{f'{key}: ' * bool(key)}{name}: {_trouble(error, name, kind)}") from error


def _trouble(error: Exception, name: str, kind: str) -> str:
    """Say in a line why a download failed and what to do, by `hub.toml`."""
    from huggingface_hub.constants import HF_HUB_CACHE

    known = tomllib.loads(Path(__file__).with_name("hub.toml").read_text(encoding="utf-8"))
    names = [each.__name__ for each in type(error).__mro__]
    if isinstance(error, OSError) and error.errno:
        names = [errno.errorcode.get(error.errno, ""), *names]
    said = (str(error).strip().splitlines() or names)[0].removeprefix("Got: ").removesuffix(".")
    place, typed = ("", "") if kind == "model" else (f"{kind}s/", f" --repo-type {kind}")
    sentence: str = next(known[each] for each in names if each in known)
    return sentence.format(name=name, kind=kind, said=said, place=place, typed=typed, cache=HF_HUB_CACHE)


WHAT = "a file or directory of prompts (JSONL, CSV, Parquet or Arrow)"
COLUMNAR = (".parquet", ".arrow")
"""Formats that pyarrow reads."""
FORMATS = (".jsonl", ".json", ".csv", *COLUMNAR)
"""Formats of a directory's files. A single file that has none of these endings is read as JSONL."""
_PART = re.compile(r"(.+?)-\d{5}-of-\d{5}(-\w+)?")
"""Name of a part of a data set on the hub: its split, its number, and the number of all."""


_CONDITION = re.compile(r"\s*([^<>=!]*[^<>=!\s])\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*", re.DOTALL)


def condition(text: str) -> tuple[str, str, str] | None:
    """Read an entry of data.filter or data.map: the column, =, !=, <, <=, > or >=, and the text after it.

    None: it is not such an entry; < and > need a number after them.
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
    """Split `path` at commas into data sets; a path that exists, commas included, is one data set."""
    return [str(path)] if os.path.exists(path) else [part.strip() for part in str(path).split(",")]


def data_files(path: Path | str) -> list[Path]:
    """List the files whose rows, one after the other, are the data set `path`, or the several that it joins.

    A directory is what `datasets` saves (`save_to_disk`), or holds files of one format and one split, as those of the
    hub do. Raises DataError for a path without such files, which says what the path is and what to write instead.
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
    if place.suffix not in FORMATS and (name := remote_name(str(place))):
        raise DataError(
            f"no such file: {place}. If {name} is a data set of the Hugging Face hub: `slurm-rlhf prefetch FILE.toml` "
            "downloads it where there is a network, as on a login node, and prints the line for the file"
        )
    raise DataError(f"no such file: {place}")


def has_rows(file: Path) -> bool:
    """Tell whether a file of a directory holds rows, and not what `datasets` notes about them."""
    return file.suffix in FORMATS and file.is_file() and file.name not in ("dataset_info.json", "dataset_infos.json")


def _directory(place: Path) -> list[Path]:
    if (place / "dataset_dict.json").is_file():
        splits = [each.name for each in sorted(place.iterdir()) if (each / "state.json").is_file()]
        raise DataError(f"{place}: holds the splits {', '.join(splits)}: name one, {place / (splits or ['SPLIT'])[0]}")
    if (place / "state.json").is_file():
        return _saved(place)
    files = [file for file in sorted(place.iterdir()) if has_rows(file)]
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
