"""Models, data sets and kernels of the Hugging Face hub by their name, OWNER/NAME: from its cache, or its network."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_rlhf.config.keys import get, put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError

KEYS = (
    "actor.model_name_or_path",
    "critic.model_name_or_path",
    "reward.model_name_or_path",
    "algo.distill.model_name_or_path",
)
"""Keys that take a name."""
WANTED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Files to download of a model, without weights in other formats, which are there a second time."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(text: str) -> bool:
    """Return whether `text` has the form OWNER/NAME."""
    return _NAME.fullmatch(text) is not None


def remote_name(text: str) -> str:
    """Return OWNER/NAME where `text` may mean it: a name, or a path of which neither OWNER nor NAME is there."""
    if is_hub_name(text):
        return text
    place = Path(text)
    name = "/".join(place.parts[-2:])
    return name if len(place.parts) > 3 and is_hub_name(name) and not place.parent.exists() else ""


def named(text: str, base: Path) -> str:
    """Return what a key of `KEYS` means: the directory of a cached model, a name, or empty: neither, but a path.

    A path counts first: where `base` has the directory OWNER, a missing OWNER/NAME is a typing error.
    """
    if not is_hub_name(text) or (base / text).exists() or (base / text).parent.exists():
        return ""
    found = cached(text.replace("/", "--"))
    return text if found is None else str(found)


def cached(folder: str) -> Path | None:
    """Find the model OWNER--NAME in the cache; None: it is not there, or was not downloaded to its end.

    Source of the layout: huggingface_hub, `constants.py` and `file_download.py`.
    """
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    model = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{folder}"
    try:
        commit = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = model / "snapshots" / commit
    return snapshot if (snapshot / "config.json").exists() else None


def fetch_models(config: Config, say: Callable[[str], None]) -> None:
    """Download the models that are named and are not in the cache. Raises ModelError where the hub does not answer."""
    for key in KEYS:
        if is_hub_name(name := get(config, key)):
            say(f"{key}: {name} is not in the Hugging Face cache: downloading it")
            put(config, key, download(name, key))


def download(name: str, key: str = "", kind: str = "model", wanted: Sequence[str] = WANTED_FILES) -> str:
    """Return the directory of a model (or `kind`: dataset) of the hub, with the `wanted` files, downloaded if need be.

    Raises ModelError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, repo_type=kind, allow_patterns=list(wanted), etag_timeout=10))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where, typed = f"{key}: {name}" if key else name, "" if kind == "model" else f" --repo-type {kind}"
        raise ModelError(
            f"{where}: no such directory, and the Hugging Face hub did not give a {kind} of that name: {said} Where "
            f"there is no network: `slurm-rlhf prefetch FILE.toml` or `hf download {name}{typed}` on a login node, "
            f"which shares its cache (HF_HOME) with the compute nodes, or `hf download {name}{typed} --local-dir DIR` "
            "elsewhere, and give DIR"
        ) from error
