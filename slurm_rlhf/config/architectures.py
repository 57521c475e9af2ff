"""List facts about models of transformers, without importing it: changes to logits, comparisons, attention kernels.

The tables by model are in `architectures.json`, each under the name that its constant has here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.errors import meant


@dataclass(frozen=True, slots=True)
class HeadFields:
    """Name the fields of a Hugging Face config by which a model changes its logits z after the head.

    z' = z * config[factor] or z / config[divisor], then z'' = config[cap] * tanh(z' / config[cap]).
    """

    factor: str = ""
    divisor: str = ""
    cap: str = ""

    @property
    def fields(self) -> set[str]:
        return {self.factor, self.divisor, self.cap} - {""}


_TABLES = json.loads(Path(__file__).with_name("architectures.json").read_text(encoding="utf-8"))

HEAD_MATH: dict[str, HeadFields] = {name: HeadFields(**row) for name, row in _TABLES["head_math"].items()}
"""model_type (of the text part) -> its formula, as in its forward in transformers."""

NESTED = {"gemma3n", "gemma4", "gemma4_unified"}
"""model_type of models around a text model that apply the formula of its config. Others (Gemma 3's among them, in
transformers) apply none, whatever the config of their text model says."""


def head_fields(model_type: str, text_type: str) -> HeadFields:
    """Return the fields of its text config that a model of `model_type` applies; its text part is of `text_type`."""
    return HEAD_MATH.get(text_type, HeadFields()) if model_type in NESTED | {text_type} else HeadFields()


HEAD_FIELDS: tuple[str, ...] = tuple(_TABLES["head_fields"])
"""All such fields of any model. A model that sets a field outside its formula is refused."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Describe an architecture for which trainer, plain transformers and vLLM gave the same log-probs.

    They agreed to 1e-5 in fp32 on CPUs, from the directory and after an update of all weights: `pytest -m ""
    tests/trainer/test_models.py tests/engine/test_vllm.py`.
    """

    model_type: str
    note: str = ""  # features that were compared beyond the plain model, or settings that the model needs here
    window_differs: bool = False  # transformers and vLLM disagree about the first token in its sliding window


COMPARED: dict[str, Compared] = {name: Compared(**row) for name, row in _TABLES["compared"].items()}
"""Class in config.json -> what was compared. Architectures in neither table are accepted with a warning: only the
self-check before the first step compares them."""

REFUSED: dict[str, str] = _TABLES["refused"]
"""Class in config.json -> why it cannot be trained here."""


PACKED = frozenset(_TABLES["packed"])
"""model_type (of the text part) of models that read sequences end to end in one row as they read each alone: compared
in fp32, with gradients, by `pytest -m "" tests/trainer/test_packing.py`. Others have layers that carry a state from
token to token, or attention of their own: a row for each sequence."""

ALONE: tuple[str, ...] = tuple(_TABLES["alone"])
"""Beginnings of the model_type or of config fields of models that are known to need a row for each sequence: they have
attention of their own, or carry a state from token to token."""


NO_LINEAR = frozenset(_TABLES["no_linear"])
"""model_type of models whose layers are of classes of their own (Conv1D, FalconLinear), which get no adapters here."""


CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of classes that predict the next token."""

ENCODERS = frozenset(_TABLES["encoders"])
"""model_type of models whose tokens see those that follow, unless the class in config.json ends as in CAUSAL."""


BUILT_IN = ("sdpa", "eager", "flex_attention")
MODULES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
"""Attention implementation -> the module that has it. Source: transformers 5.19, `modeling_flash_attention_utils`."""
KERNELS = "kernels"
"""Package that loads compiled kernels from a cache, for names with a slash and in place of a missing module."""


def problem(name: str) -> str:
    """Return what is wrong with the value of `ds.attn_implementation`; empty for a known name or a kernel."""
    if name in BUILT_IN or name in MODULES or "/" in name:
        return ""
    valid = [*BUILT_IN, *MODULES]
    unknown = f"ds.attn_implementation = {name!r} is not known{meant(name, valid)}"
    return f"{unknown} (valid: {', '.join(valid)}, or a kernel as OWNER/NAME)"


def missing(name: str, installed: dict[str, bool]) -> str:
    """Return what `name` needs and `installed` (module -> is it there) lacks, with the remedy; empty: nothing."""
    if unknown := problem(name):
        return unknown
    if name in BUILT_IN or installed.get(KERNELS):
        return ""
    if "/" in name:
        return (
            f"ds.attn_implementation = {name} needs the package kernels: pip install kernels, and fetch the kernel "
            "once where there is a network (ranks are offline), or use sdpa"
        )
    if installed.get(MODULES[name]):
        return ""
    return (
        f"ds.attn_implementation = {name} needs the module {MODULES[name]} (pip install flash-attn), or the package "
        "kernels with that kernel in its cache; sdpa needs neither and runs causal flash kernels"
    )


def wanted_modules() -> tuple[str, ...]:
    """List the modules that a node has to look for."""
    return (KERNELS, *MODULES.values())
