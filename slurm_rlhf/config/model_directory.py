"""Check the model directories of Hugging Face before anything starts, and read the shapes of their weights."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_rlhf.config.architectures import COMPARED, HEAD_FIELDS, REFUSED, head_fields
from slurm_rlhf.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_model_directory(key: str, path: str, *, tokenizer: bool) -> None:
    """Check that `path` holds config.json, weights and, if wanted, tokenizer.json. Raises ModelError."""
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(
            f"{key}: no such directory: {path} (a model of the Hugging Face hub must be downloaded first: "
            "`hf download <name> --local-dir <directory>`)"
        )
    check_not_quantised(key, path, read_config(key, directory))
    if not any((directory / name).is_file() for name in WEIGHTS):
        raise ModelError(f"{key}: {path} holds no weights (none of {', '.join(WEIGHTS)})")
    if tokenizer:
        require_tokenizer(directory, f"{key}: ")


def check_not_quantised(key: str, path: str | Path, config: Mapping[str, Any]) -> None:
    """Check that the weights are not quantised, by the parsed config.json of the model. Raises ModelError."""
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        raise ModelError(
            f"{key}: {path} holds quantised weights (quantization_config, {method or 'no method named'}), which cannot "
            "be trained here: use the model it was made from, in bf16, fp16 or fp32"
        )


def require_tokenizer(directory: Path, where: str = "") -> Path:
    """Return tokenizer.json of the directory. Raises ModelError that says how to get one."""
    file = directory / "tokenizer.json"
    if file.is_file():
        return file
    slow = [name for name in SLOW_TOKENIZERS if (directory / name).is_file()]
    if slow:
        raise ModelError(
            f"{where}{directory} holds a slow tokenizer ({slow[0]}) but no tokenizer.json: convert it with "
            "`AutoTokenizer.from_pretrained(directory).save_pretrained(directory)`"
        )
    raise ModelError(
        f"{where}{directory} holds no tokenizer (tokenizer.json): save the model's tokenizer there with "
        "`tokenizer.save_pretrained(directory)`"
    )


def check_length(key: str, path: str, max_len: int) -> None:
    """Check that the model has positions for sequences of `max_len` tokens. Raises ModelError."""
    config = _text_config(read_config(key, Path(path)))
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # `dynamic` stretches with the length of the text, which engines do not.
    stretched = "factor" in scaling and "dynamic" not in (scaling.get("rope_type"), scaling.get("type"))
    if isinstance(positions, int) and not stretched and max_len > positions:
        raise ModelError(
            f"data.max_len = {max_len} is longer than the {positions} positions (max_position_embeddings) of {key} = "
            f"{path}: lower data.max_len to at most {positions}"
        )


def check_architecture(key: str, path: str, max_len: int) -> None:
    """Check that the model can be trained, and warn of one that was not compared. Raises ModelError.

    `architectures` has what is known; engines sample texts of up to `max_len` tokens.
    """
    config = read_config(key, Path(path))
    text = _text_config(config)
    names = config.get("architectures") or []
    for name in names:
        if name in REFUSED:
            raise ModelError(f"{key}: {path} is a {name}, which cannot be trained here: {REFUSED[name]}")
        window = text.get("sliding_window")
        if name in COMPARED and COMPARED[name].window_differs and isinstance(window, int) and max_len > window:
            raise ModelError(
                f"{key}: {path} is a {name} with a sliding window of {window} tokens. Beyond it transformers, which "
                f"trains, and vLLM, which samples, disagree by a token: lower data.max_len = {max_len} to {window}"
            )
    outer = str(config.get("model_type"))
    known = head_fields(outer, str(text.get("model_type")))
    for field in HEAD_FIELDS:
        value = text.get(field)
        if value not in (None, 1, 1.0) and field not in known.fields:
            raise ModelError(
                f"{key}: {path}/config.json has {field} = {value}, by which models change their logits behind the "
                f"head, and how a {outer} does it is not known here: use a model without {field}"
            )
    if names and not any(name in COMPARED for name in names):
        log.warning(
            "%s: %s is a %s, which was never compared with transformers and vLLM: train.self_check compares "
            "them before the first step. Compared were %s",
            *(key, path, names[0], ", ".join(sorted(COMPARED))),
        )


def check_tensor_parallel(key: str, path: str, size: int) -> None:
    """Check that heads and layers divide over the `size` ranks of an engine. Raises ConfigError.

    vLLM divides attention heads and the inner width of an MLP evenly, key-value heads evenly or each for several
    ranks, the vocabulary padded to a multiple of 64.
    """
    config = _text_config(read_config(key, Path(path)))
    heads, width = config.get("num_attention_heads"), config.get("intermediate_size")
    shared = config.get("num_key_value_heads") or heads
    if not (isinstance(heads, int) and isinstance(shared, int)):
        return  # vLLM knows better how this model counts

    def fits(ranks: int) -> bool:
        inner = not isinstance(width, int) or width % ranks == 0
        return heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0) and inner and 64 % ranks == 0

    if not fits(size):
        valid = ", ".join(str(ranks) for ranks in range(1, heads + 1) if fits(ranks))
        raise ConfigError(
            f"vllm.tensor_parallel_size = {size} does not divide the model of {key} = {path}: {heads} attention heads, "
            f"{shared} key-value heads, intermediate_size {width}, vocabulary in blocks of 64. Valid sizes: {valid}"
        )


def read_config(key: str, directory: Path) -> dict[str, Any]:
    """Parse config.json of the directory. Raises ModelError, whose message starts with `key`."""
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{key}: {directory} is not a Hugging Face model: it holds no config.json") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}: {file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{key}: {file} is not a JSON object")
    return config


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text part, for a model that reads more than text."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def stored_parameters(path: str) -> list[tuple[str, list[int]]]:
    """List name and shape of the tensors in the safetensors files of `path`, in the order of their layers.

    Raises ModelError when there are none, or one cannot be read.
    """
    directory = Path(path)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    found: list[tuple[str, list[int]]] = []
    for name in files:
        found += _header(directory / name)
    return sorted(found, key=lambda item: _layer_order(item[0]))


def _header(file: Path) -> list[tuple[str, list[int]]]:
    """Read the header of a file. Source of the format: huggingface/safetensors, README, "Format"."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        return [(name, list(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
    except FileNotFoundError:
        raise ModelError(f"{file.parent} holds no {file.name}: only safetensors can be planned with") from None
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ModelError(f"{file} is not a safetensors file: {error}") from None


def _layer_order(name: str) -> tuple[object, ...]:
    """Sort parameters: embedding first, layers by number, then the rest."""
    words = name.split(".")
    number = next((int(word) for word in words if word.isdecimal()), None)
    place = 1 if number is not None else 0 if "embed" in name else 2
    return (place, number or 0, name)
