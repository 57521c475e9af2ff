"""Which attention implementations of transformers the trainers may have, and what each needs to be installed."""

from __future__ import annotations

import difflib

BUILT_IN = ("sdpa", "eager", "flex_attention")
MODULES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
"""Name -> the module that holds it. Source: transformers 5.19, `modeling_flash_attention_utils`."""
KERNELS = "kernels"
"""The package that loads compiled kernels from a cache: of a name with a slash, and in place of a missing module."""


def problem(name: str) -> str:
    """What is wrong with `ds.attn_implementation`; empty: it is a name of transformers, or of a kernel."""
    if name in BUILT_IN or name in MODULES or "/" in name:
        return ""
    near = difflib.get_close_matches(name, [*BUILT_IN, *MODULES], n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return (
        f"ds.attn_implementation = {name!r} is not known{meant} (valid: {', '.join([*BUILT_IN, *MODULES])}, or a "
        "kernel as OWNER/NAME)"
    )


def missing(name: str, installed: dict[str, bool]) -> str:
    """What `name` needs and `installed` (module -> is it there) lacks, with the remedy; empty: nothing."""
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
    """What a node is to look for."""
    return (KERNELS, *MODULES.values())
