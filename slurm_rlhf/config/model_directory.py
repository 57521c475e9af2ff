"""Check the model directories of Hugging Face, and the headers of their weight files, without torch or transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.algorithms.lora import check_targets, last_part
from slurm_rlhf.config.architectures import CAUSAL, COMPARED, ENCODERS, HEAD_FIELDS, NO_LINEAR, REFUSED, head_fields
from slurm_rlhf.config.schema_models import Lora
from slurm_rlhf.config.user_data import is_hub_name
from slurm_rlhf.errors import ConfigError, ModelError, shortened

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_model_directory(key: str, path: str, *, tokenizer: bool) -> None:
    """Check that `path` holds config.json, whole weights and, if wanted, tokenizer.json. Raises ModelError."""
    directory = Path(path)
    if is_hub_name(path):
        raise ModelError(
            f"{key}: no such directory, and the Hugging Face cache here has no model {path}: `slurm-rlhf prefetch "
            f"FILE.toml` or `hf download {path}` where there is a network, as on a login node that shares its cache "
            "(HF_HOME) with the compute nodes"
        )
    if directory.is_file():
        remedy = (
            _GGUF if directory.suffix == ".gguf" else "name the directory that it is in, with config.json and weights"
        )
        raise ModelError(f"{key}: {path} is a file, and a model is a directory: {remedy}")
    if not directory.is_dir():
        raise ModelError(
            f"{key}: no such directory: {path} (a model of the Hugging Face hub must be downloaded first: "
            "`hf download <name> --local-dir <directory>`)"
        )
    check_not_quantised(key, path, read_config(key, directory))
    if not any((directory / name).is_file() for name in WEIGHTS):
        lacking = f"weights (none of {', '.join(WEIGHTS)})"
        raise ModelError(f"{key}: {path} {_instead_of_model(directory, lacking)}")
    try:
        for file in weight_files(directory):
            _check_file(file)  # a few kB of it, so that a broken download is found before anything starts
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from None
    if tokenizer:
        require_tokenizer(directory, f"{key}: ")


def check_not_quantised(key: str, path: str | Path, config: Mapping[str, Any]) -> None:
    """Check that the weights are not quantised, by the parsed config.json of the model. Raises ModelError."""
    if quantised := config.get("quantization_config"):
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
    config = text_config(read_config(key, Path(path)))
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # `dynamic` stretches with the length of the text, which engines do not.
    stretched = "factor" in scaling and "dynamic" not in (scaling.get("rope_type"), scaling.get("type"))
    if isinstance(positions, int) and not stretched and max_len > positions:
        raise ModelError(
            f"data.max_len = {max_len} is longer than the {positions} positions (max_position_embeddings) of {key} = "
            f"{path}: lower data.max_len to at most {positions}"
        )


def check_architecture(key: str, path: str, *, head: bool = True, sampled_len: int = 0, engines: bool = True) -> None:
    """Check that the model can be trained. Raises ModelError, which names its architecture.

    The tables are in `architectures`. `head`: its own head gives log-probs; False: its body alone gives values or
    scores. `sampled_len`: engines sample texts of up to so many tokens from it; 0: no engine does. `engines` False: no
    engine will ever run it, so REFUSED, whose models are refused because of engines, does not count.
    """
    config = read_config(key, Path(path))
    text = text_config(config)
    names = config.get("architectures") or []
    for name in names:
        if engines and name in REFUSED:
            raise ModelError(f"{key}: {path} is a {name}, which cannot be trained here: {REFUSED[name]}")
        window = text.get("sliding_window")
        if name in COMPARED and COMPARED[name].window_differs and isinstance(window, int) and sampled_len > window:
            raise ModelError(
                f"{key}: {path} is a {name} with a sliding window of {window} tokens. Beyond it transformers, which "
                f"trains, and vLLM, which samples, disagree by a token: lower data.max_len = {sampled_len} to {window}"
            )
    _check_causal(key, path, config, head)
    outer = str(config.get("model_type"))
    known = head_fields(outer, str(text.get("model_type")))
    for field in HEAD_FIELDS if head else ():
        value = text.get(field)
        if value not in (None, 1, 1.0) and field not in known.fields:
            raise ModelError(
                f"{key}: {path}/config.json has {field} = {value}, by which models change their logits after the "
                f"head, and how a {outer} does it is not known here: use a model without {field}"
            )


REWARD_HEADS = ("score", "value_head", "v_head.summary")
"""Names of a reward model's head: Hugging Face sequence classification and OpenRLHF; OpenRLHF with another prefix; TRL.

Each is a linear layer with one output, `<head>.weight` [1, H] and perhaps `<head>.bias` [1], on the last hidden states.
"""


def reward_head(names: Collection[str], path: str | Path) -> str:
    """Return which of REWARD_HEADS is among the `names` of the tensors in `path`. Raises ModelError unless one is."""
    found = [head for head in REWARD_HEADS if f"{head}.weight" in names]
    if len(found) != 1:
        what = f"{' and '.join(found)} are in it" if found else "none of them is in it"
        known = ", ".join(f"{head}.weight" for head in REWARD_HEADS)
        raise ModelError(
            f"{path}: a reward model has one head out of {known}; {what}. Sequence classification models of "
            "decoders (AutoModelForSequenceClassification), TRL's and OpenRLHF's value heads can be used."
        )
    return found[0]


def check_head(key: str, path: str, *, language: bool, needed: bool = True) -> None:
    """Check that the weights have the head of a language model, or of a reward model. Raises ModelError.

    `needed` False: a missing reward head is no error, a new one is made. Reads headers of safetensors files; models
    with files of other formats are checked only when they are loaded.
    """
    files, config = weight_files(Path(path)), read_config(key, Path(path))
    if any(file.suffix != ".safetensors" for file in files):
        return
    shapes = {name: entry["shape"] for file in files for name, entry in _header(file)[0].items()}
    if not language and (needed or any(f"{head}.weight" in shapes for head in REWARD_HEADS)):
        head = reward_head(shapes, f"{key}: {path}")
        check_head_shape(f"{key}: {path}", head, shapes[f"{head}.weight"], text_config(config).get("hidden_size"))
    elif language and config.get("tie_word_embeddings") is False and "text_config" not in config:
        rows = config.get("vocab_size")
        if sum(shape[:1] == [rows] for shape in shapes.values()) == 1:
            raise ModelError(
                f"{key}: {path} has no output head: config.json says tie_word_embeddings = false, and one matrix alone "
                f"has {rows} rows (vocab_size), the embeddings. Complete the directory, or set tie_word_embeddings = "
                "true where both are one matrix"
            )


def check_adapters(key: str, path: str, targets: Sequence[str]) -> None:
    """Check lora.target_modules by the headers of safetensors files. Raises ModelError.

    For models that were never compared, whose layers transformers may rename, only experts are refused here.
    """
    files, config = weight_files(Path(path)), read_config(key, Path(path))
    headers = [_header(file)[0] for file in files if file.suffix == ".safetensors"]
    shapes = {name.removesuffix(".weight"): entry["shape"] for header in headers for name, entry in header.items()}
    rows, linear = text_config(config).get("vocab_size"), text_config(config).get("model_type") not in NO_LINEAR
    known = {last_part(name) for name, shape in shapes.items() if linear and len(shape) == 2 and shape[0] != rows}
    if linear and (len(headers) < len(files) or COMPARED.keys().isdisjoint(config.get("architectures") or [])):
        known = {*targets}
    if shapes or not linear:
        check_targets(f"{key} = {path}", {part for name in shapes for part in name.split(".")}, known, targets)


def check_head_shape(where: str, head: str, shape: list[int], hidden: int | None) -> None:
    """Check that the head has one output for states of size `hidden`, None: of any. Raises ModelError."""
    if shape != [1, hidden or shape[-1]]:
        raise ModelError(
            f"{where}: {head}.weight has shape {shape}, not [1, {hidden or shape[-1]}]: a reward model gives one "
            "number (num_labels = 1). Use another model."
        )


def _check_causal(key: str, path: str, config: Mapping[str, Any], head: bool) -> None:
    """Check that a token's state depends only on the tokens before it and, with `head`, that the model is causal."""
    names, kind = config.get("architectures") or [], str(config.get("model_type"))
    what = f"{key}: {path} is a {names[0] if names else kind}"
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{what}, which has an encoder and a decoder: a decoder-only model is needed")
    if kind in ENCODERS and not any(name.endswith(CAUSAL) for name in names):
        raise ModelError(
            f"{what}, an encoder whose tokens see those that follow: a causal language model is needed, with a class "
            "such as Qwen2ForCausalLM in its config.json"
        )
    if head and names and not any(name.endswith(CAUSAL) for name in names):
        raise ModelError(
            f"{what}, which is no causal language model and cannot sample a response: use a directory whose "
            "config.json names a class such as Qwen2ForCausalLM (a reward model belongs to reward.model_name_or_path)"
        )


def uncompared(key: str, path: str) -> str:
    """Say that the architecture of a model that engines sample from was never compared; empty if it was."""
    names = read_config(key, Path(path)).get("architectures") or []
    if not names or any(name in COMPARED for name in names):
        return ""
    return (
        f"{key}: {path} is a {names[0]}, which was never compared with transformers and vLLM: train.self_check "
        f"compares them before the first step. Compared were {', '.join(sorted(COMPARED))}"
    )


def check_tensor_parallel(key: str, path: str, size: int) -> None:
    """Check that heads and layers divide over the `size` ranks of an engine. Raises ConfigError.

    vLLM divides attention heads and the inner width of an MLP evenly, key-value heads evenly or each for several
    ranks, the vocabulary padded to a multiple of 64.
    """
    config = text_config(read_config(key, Path(path)))
    heads, width = config.get("num_attention_heads"), config.get("intermediate_size")
    shared = config.get("num_key_value_heads") or heads
    if not (isinstance(heads, int) and isinstance(shared, int)):
        return  # config.json does not say it here; vLLM checks this model itself

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
        raise ModelError(f"{key}: {directory} {_instead_of_model(directory, 'config.json')}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}: {file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{key}: {file} is not a JSON object")
    return config


_GGUF = "GGUF cannot be trained, give the Hugging Face model that it was made from"


def _instead_of_model(directory: Path, lacking: str) -> str:
    """Say what a directory without `lacking` is, and what to do."""
    if (directory / "adapter_config.json").is_file():
        return (
            "is a LoRA adapter and no whole model: put it into the model that it belongs to "
            "(`AutoPeftModelForCausalLM.from_pretrained(directory).merge_and_unload().save_pretrained(other)`; of a "
            "reward model AutoPeftModelForSequenceClassification, with num_labels=1)"
        )
    if any(directory.glob("*.gguf")):
        return f"holds GGUF files: {_GGUF}"
    return f"is not a Hugging Face model: it holds no {lacking}"


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text part, for a model that reads more than text."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
_POINTER = b"version https://git-lfs"
"""Beginning of the text file that Git leaves in place of a large file that was not fetched."""
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def weight_files(directory: Path) -> list[Path]:
    """List the files that the index names, or the single file, as transformers chooses them."""
    for index in (directory / name for name in INDICES):
        if (directory / index.name.removesuffix(".index.json")).is_file():
            return [directory / index.name.removesuffix(".index.json")]
        if index.is_file():
            files = [directory / name for name in _named(index)]
            absent = [file.name for file in files if not file.is_file()]
            if absent:
                raise ModelError(
                    f"{index} names {len(absent)} of {len(files)} files that are not there ({shortened(absent, 3)}): "
                    "the download or copy is incomplete, repeat it"
                )
            return files
    return []


def _named(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}: repeat the download") from None


def _check_file(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            begins = opened.read(len(_POINTER))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    if begins == _POINTER:
        raise ModelError(f"{file} is a pointer of Git LFS and no weights: `git lfs pull` fetches them")
    if file.suffix != ".safetensors":
        return
    entries, length = _header(file)
    whole = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    if (size := file.stat().st_size) != whole:
        raise ModelError(
            f"{file} has {size} bytes, and by its header {whole}: the download or copy is incomplete, repeat it"
        )


def stored_parameters(path: str) -> list[tuple[str, list[int]]]:
    """List name and shape of the tensors in the safetensors files of `path`, in the order of their layers.

    Raises ModelError when there are none, or one cannot be read.
    """
    files = [file for file in weight_files(Path(path)) if file.suffix == ".safetensors"]
    headers = [_header(file)[0] for file in files or [Path(path) / "model.safetensors"]]
    found = [(name, list(entry["shape"])) for header in headers for name, entry in header.items()]
    if not found:
        raise ModelError(f"{path} holds no tensor")
    return sorted(found, key=lambda item: _layer_order(item[0]))


def sent_parameters(path: str, lora: Lora) -> list[tuple[str, list[int]]]:
    """List name and shape of what a weight update sends to engines of the model in `path`: its tensors, or adapters.

    Raises ModelError as `stored_parameters` does.
    """
    stored = stored_parameters(path)
    return adapters_of(stored, lora) if lora.rank else stored


def adapters_of(stored: list[tuple[str, list[int]]], lora: Lora) -> list[tuple[str, list[int]]]:
    """List name and shape of the adapters for the tensors `stored`; matrices in numbered layers have adapters."""
    sent = []
    for name, shape in stored:
        path = name.removesuffix(".weight").split(".")
        if len(shape) == 2 and any(map(str.isdigit, path)) and {path[-1], "all-linear"} & {*lora.target_modules}:
            layer = ".".join(path)
            sent += [(f"{layer}.lora_A.weight", [lora.rank, shape[1]])]
            sent += [(f"{layer}.lora_B.weight", [shape[0], lora.rank])]
    return sent


def _header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return name -> shape and place of each tensor, and the header's length in bytes.

    Source of the format: huggingface/safetensors, README, "Format".
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for entry in entries.values():
            entry["shape"], int(entry["data_offsets"][1])
        return entries, length
    except FileNotFoundError:
        raise ModelError(f"{file.parent} holds no {file.name}: shapes are read from safetensors files only") from None
    except struct.error:
        raise ModelError(f"{file} is not a safetensors file: it is empty, or ends within its header") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} is not a safetensors file: {error}") from None


def _layer_order(name: str) -> tuple[object, ...]:
    """Sort parameters: embedding first, layers by number, then the rest."""
    words = name.split(".")
    number = next((int(word) for word in words if word.isdecimal()), None)
    place = 1 if number is not None else 0 if "embed" in name else 2
    return (place, number or 0, name)
