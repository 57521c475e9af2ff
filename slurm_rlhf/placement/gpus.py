"""Know data-center GPUs by name: their memory and peak rates, and the memory that a run can count on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_rlhf.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    """Describe one kind of GPU.

    `memory_gib` is what CUDA gives to processes, as `torch.cuda.get_device_properties` reports it, rounded down: a
    little less than nvidia-smi's total. `bf16_tflops` is the vendor's published dense peak of matrix products in bf16
    with sums in fp32, without sparsity; 0: the GPU has no bf16 matrix units.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    model: str  # regular expression of the model in a name whose words are apart
    words: tuple[str, ...] = ()  # one of them decides between kinds of one model; empty: what the model is by default


_H, _A = r"h100", r"a100"
GPUS: tuple[Gpu, ...] = (
    Gpu("B300", 267.0, 2250.0, r"b300"),
    Gpu("GB200", 184.0, 2500.0, r"gb200"),
    Gpu("B200", 178.0, 2250.0, r"b200"),
    Gpu("GH200 144GB", 139.0, 989.4, r"gh200", ("144gb", "144g", "144", "hbm3e")),
    Gpu("GH200 96GB", 94.0, 989.4, r"gh200"),
    Gpu("H200 NVL", 139.7, 835.5, r"h200", ("nvl",)),
    Gpu("H200", 139.7, 989.4, r"h200"),
    Gpu("H100 NVL", 93.0, 835.5, _H, ("nvl", "94gb", "94g", "94")),
    Gpu("H100 PCIe", 79.1, 756.0, _H, ("pcie",)),
    Gpu("H100 64GB", 63.3, 989.4, _H, ("64gb", "64g", "64")),
    Gpu("H100 96GB", 94.0, 989.4, _H, ("96gb", "96g", "96")),
    Gpu("H100", 79.1, 989.4, _H),
    Gpu("H800", 79.1, 989.4, r"h800"),
    Gpu("H20", 95.0, 148.0, r"h20"),
    Gpu("A100 40GB", 39.3, 312.0, _A, ("40gb", "40g", "40")),
    Gpu("A100 64GB", 63.3, 312.0, _A, ("64gb", "64g", "64")),
    Gpu("A100 80GB", 79.1, 312.0, _A),
    Gpu("A800 40GB", 39.3, 312.0, r"a800", ("40gb", "40g", "40")),
    Gpu("A800 80GB", 79.1, 312.0, r"a800"),
    Gpu("A40", 44.3, 149.7, r"a40"),
    Gpu("A30", 23.4, 165.0, r"a30"),
    Gpu("A10G", 22.0, 70.0, r"a10g"),
    Gpu("A10", 22.0, 125.0, r"a10"),
    Gpu("L40S", 44.3, 362.0, r"l40s"),
    Gpu("L40", 44.3, 181.0, r"l40"),
    Gpu("L4", 21.9, 121.0, r"l4"),
    Gpu("RTX PRO 6000 Blackwell", 94.9, 503.8, r"(?:rtx )?pro ?6000"),
    Gpu("RTX 6000 Ada", 47.4, 364.2, r"(?:rtx|quadro) ?6000", ("ada",)),
    Gpu("RTX A6000", 47.4, 154.8, r"a6000"),
    Gpu("Quadro RTX 8000", 44.4, 0.0, r"rtx ?8000"),
    Gpu("Quadro RTX 6000", 22.1, 0.0, r"(?:rtx|quadro) ?6000"),
    Gpu("RTX 5090", 31.3, 209.5, r"(?:rtx ?)?5090"),
    Gpu("RTX 4090", 23.5, 165.2, r"(?:rtx ?)?4090"),
    Gpu("RTX 3090", 23.5, 71.0, r"(?:rtx ?)?3090"),
    Gpu("V100 16GB", 15.7, 0.0, r"v100s?", ("16gb", "16g", "16")),
    Gpu("V100 32GB", 31.7, 0.0, r"v100s?"),
    Gpu("T4", 14.5, 0.0, r"t4"),
    Gpu("MI210", 63.9, 181.0, r"mi210"),
    Gpu("MI250X, one of its two dies", 63.9, 191.5, r"mi250x"),
    Gpu("MI250, one of its two dies", 63.9, 181.0, r"mi250"),
    Gpu("MI300A", 127.9, 980.6, r"mi300a"),
    Gpu("MI300X", 191.9, 1307.4, r"mi300x?"),
    Gpu("MI325X", 255.9, 1307.4, r"mi325x?"),
)
"""Sources: the vendors' data sheets and architecture papers. Of kinds of one model the last is the most common."""

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


def known_names() -> str:
    """List all names of the table, for a message."""
    return ", ".join(gpu.name for gpu in GPUS)


def _spaced(name: str) -> str:
    """Separate the words of a name: `NVIDIA_A100-SXM4-80GB` -> `nvidia a100 sxm4 80gb`."""
    return re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()


def _says(text: str, words: tuple[str, ...]) -> bool:
    """Tell whether `text` has one of `words`; letters may follow a number directly: `h100nvl`, `rtx6000ada`."""
    return any(
        re.search(rf"(?<![{'a-z0-9' if word[0].isdigit() else 'a-z'}]){word}(?![a-z0-9])", text) for word in words
    )


GIB = 1 << 30
_USABLE = 0.985  # share of the memory in nvidia-smi that CUDA leaves to processes of an unknown GPU
TELL = "--train.gpu=NAME (h100, a100_40gb, ...) or --train.gpu_memory_gb=GB"
_UNLIKE = 0.02


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


def told_size(name: str, memory_gb: float) -> GpuSize | None:
    """Return the size that the user sets, by memory or by name; None where neither is set. Raises ConfigError."""
    gpu = find_gpu(name) if name else None
    if name and gpu is None and not memory_gb:
        raise ConfigError(
            f"train.gpu: {name!r} is no GPU that is known here: say its memory by train.gpu_memory_gb, or name one of: "
            f"{known_names()}"
        )
    if memory_gb:
        return GpuSize(int(memory_gb * _USABLE * GIB), f"{name or 'a GPU'} of {memory_gb:g} GB", gpu=gpu)
    return _of_table(gpu, name) if gpu is not None else None


def found_size(local: Sequence[tuple[str, float]], types: Mapping[str, Sequence[str]]) -> GpuSize:
    """Return the size of the GPUs in the allocation; where they differ, the smallest counts.

    `local` has name and MiB of each GPU here, from nvidia-smi; `types` has the types of the GPUs of each node in the
    words of Slurm, if it has any.
    """
    here = [_local(name, mib) for name, mib in local]
    sizes = {f"{size.name}": size for size in here}
    unknown: list[str] = []
    for node, names in types.items():
        for name in names:
            gpu = find_gpu(name)
            if gpu is None:
                unknown.append(f"{name} ({node})")
            elif not (other_size(name) and here) and gpu.name not in sizes:
                sizes[gpu.name] = _of_table(gpu, name)
    if not sizes:
        why = f"GPUs of type {', '.join(unknown[:3])} are not in the table" if unknown else "no GPU says its name"
        return GpuSize(0, notes=(f"{why}: say {TELL}",))
    least = min(sizes.values(), key=lambda size: size.memory)
    most = max(size.memory for size in sizes.values())
    notes = list(least.notes)
    if most > (1 + _UNLIKE) * least.memory:
        each = ", ".join(f"{name} ({size.gib:.1f} GiB)" for name, size in sizes.items())
        notes.append(f"GPUs of unlike size: {each}. The smallest counts, as any rank may get it")
    if unknown:
        notes.append(f"GPUs of type {', '.join(unknown[:3])} are not in the table and were left out")
    return GpuSize(least.memory, least.name, tuple(notes), least.gpu)


def _local(name: str, mib: float) -> GpuSize:
    """Return the size of a GPU of this machine. nvidia-smi knows the GPU, and the table what CUDA leaves of it."""
    gpu, memory = find_gpu(name), mib * (1 << 20)
    if gpu is not None and abs(gpu.memory_gib * GIB - memory) < 0.05 * memory:
        return GpuSize(int(gpu.memory_gib * GIB), gpu.name, gpu=gpu)
    return GpuSize(int(memory * _USABLE), f"{name} of {mib / 1024:.0f} GB", gpu=gpu)


def _of_table(gpu: Gpu, name: str) -> GpuSize:
    other = other_size(name)
    notes = (f"{name} is taken for {gpu.name}; where it has {other} GB, say --train.gpu_memory_gb={other}",)
    return GpuSize(int(gpu.memory_gib * GIB), gpu.name, notes if other else (), gpu)
