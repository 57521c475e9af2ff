"""Look up data-center GPUs by name: their memory and peak rates, and the memory that a run can count on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_rlhf.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    """Describe one kind of GPU.

    `memory_gib` is what CUDA gives to processes, as `torch.cuda.get_device_properties` reports it, rounded down: a
    little less than nvidia-smi's total. `bf16_tflops` is the vendor's published dense peak of matrix products in bf16
    with sums in fp32, without sparsity; 0: the GPU has no bf16 matrix units. `bandwidth_gbs` is that of its memory, in
    GB/s.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    bandwidth_gbs: float
    model: str  # regular expression for the model, in a name as `_spaced` writes it
    words: Sequence[str] = ()  # the name must have one of them, to tell kinds of a model apart; empty: the usual kind


_ROWS = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))

GPUS: tuple[Gpu, ...] = tuple(Gpu(*row) for row in _ROWS)
"""Rows of `gpus.json`, each with the fields of `Gpu`. Of several kinds of one model the last is the most common.

Sources: the vendors' data sheets and architecture papers.
"""

SEVERAL_SIZES = {"A100 80GB": 40, "A800 80GB": 40, "V100 32GB": 16, "GH200 96GB": 144}
"""Kinds that a name without a size may mean, and the GB of the other size sold under that name."""

_SIZE = re.compile(r"(?<![0-9])(?:16|32|40|64|80|94|96|141|144)g?b?(?![0-9a-z])")
_SLICE = re.compile(r"(?<![0-9a-z])\d+g[ .]\d+gb|(?<![a-z])mig(?![a-z])")


def find_gpu(name: str) -> Gpu | None:
    """Find the GPU that `name` means; None for an unknown name and for a MIG slice.

    `name` is what nvidia-smi and PyTorch say ("NVIDIA A100-SXM4-80GB"), or a type of Slurm's GRES ("a100",
    "nvidia_h100_80gb_hbm3"). A name that may mean several sizes stands for the largest: see `other_size`.
    """
    if _SLICE.search(name.lower()):
        return None
    text = _spaced(name)
    for gpu in GPUS:
        if re.search(rf"(?<![a-z0-9]){gpu.model}(?![0-9])", text) and (not gpu.words or _says(text, gpu.words)):
            return gpu
    return None


def other_size(name: str) -> int:
    """Return the other size in GB that `name` may mean as well; 0 where the name is clear."""
    gpu = find_gpu(name)
    if gpu is None or _SIZE.search(_spaced(name)):
        return 0
    return SEVERAL_SIZES.get(gpu.name, 0)


def _spaced(name: str) -> str:
    """Separate the words of a name: `NVIDIA_A100-SXM4-80GB` -> `nvidia a100 sxm4 80gb`."""
    return re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()


def _says(text: str, words: Sequence[str]) -> bool:
    """Tell whether `text` has one of `words`; letters may follow a number directly: `h100nvl`, `rtx6000ada`."""
    return any(
        re.search(rf"(?<![{'a-z0-9' if word[0].isdigit() else 'a-z'}]){word}(?![a-z0-9])", text) for word in words
    )


GIB = 1 << 30
_USABLE = 0.985  # share of the memory in nvidia-smi that CUDA leaves to processes of an unknown GPU
TELL = "--train.gpu=NAME (h100, a100_40gb, ...) or --train.gpu_memory_gb=GB"
_UNLIKE = 0.02  # relative difference of memory above which GPUs count as unlike


@dataclass(frozen=True, slots=True)
class GpuSize:
    """Hold the memory of a GPU in bytes (0: not known), its name, and notes for the user."""

    memory: int
    name: str = ""
    notes: tuple[str, ...] = ()
    gpu: Gpu | None = None

    @property
    def gib(self) -> float:
        return self.memory / GIB


def size_by_keys(name: str, memory_gb: float) -> GpuSize | None:
    """Return the size that the user sets, by memory or by name; None where neither is set. Raises ConfigError."""
    gpu = find_gpu(name) if name else None
    if name and gpu is None and not memory_gb:
        raise ConfigError(
            f"train.gpu: {name!r} is no GPU that is known here: say its memory by train.gpu_memory_gb, or name one of: "
            f"{', '.join(known.name for known in GPUS)}"
        )
    if memory_gb:
        return GpuSize(int(memory_gb * _USABLE * GIB), f"{name or 'a GPU'} of {memory_gb:g} GB", gpu=gpu)
    if gpu is None:
        return None
    other = other_size(name)
    notes = (f"{name} is taken for {gpu.name}; where it has {other} GB, say --train.gpu_memory_gb={other}",)
    return GpuSize(int(gpu.memory_gib * GIB), gpu.name, notes if other else (), gpu)


def found_size(local: Sequence[tuple[str, float]]) -> GpuSize:
    """Return the size of the GPUs here; `local`: name and MiB of each. If they differ, the smallest counts."""
    sizes = {size.name: size for size in (_local(name, mib) for name, mib in local)}
    if not sizes:
        return GpuSize(0, notes=(f"no GPU says its name: say {TELL}",))
    least = min(sizes.values(), key=lambda size: size.memory)
    if max(size.memory for size in sizes.values()) <= (1 + _UNLIKE) * least.memory:
        return least
    each = ", ".join(f"{name} ({size.gib:.1f} GiB)" for name, size in sizes.items())
    return replace(least, notes=(f"GPUs of unlike size: {each}. The smallest counts, as any rank may get it",))


def _local(name: str, mib: float) -> GpuSize:
    """Return the size of a GPU of this machine: from the table, if it has a GPU of this name and about this memory."""
    gpu, memory = find_gpu(name), mib * (1 << 20)
    if gpu is not None and abs(gpu.memory_gib * GIB - memory) < 0.05 * memory:
        return GpuSize(int(gpu.memory_gib * GIB), gpu.name, gpu=gpu)
    return GpuSize(int(memory * _USABLE), f"{name} of {mib / 1024:.0f} GB", gpu=gpu)
