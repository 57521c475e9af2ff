"""How much memory the GPUs of a run have: as the user says, as nvidia-smi says, or by Slurm's name of their type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.placement.gpus import Gpu, find_gpu, known_names, other_size

GIB = 1 << 30
_USABLE = 0.985  # of what nvidia-smi shows: what CUDA leaves to processes of an unknown GPU
TELL = "--train.gpu=NAME (h100, a100_40gb, ...) or --train.gpu_memory_gb=GB"
_UNLIKE = 0.02


@dataclass(frozen=True, slots=True)
class GpuSize:
    """`memory` in bytes, 0: not known. `name` says which GPU that is, and `notes` what the user should know of it."""

    memory: int
    name: str = ""
    notes: tuple[str, ...] = ()
    gpu: Gpu | None = None

    @property
    def gib(self) -> float:
        return self.memory / GIB


def told_size(name: str, memory_gb: float) -> GpuSize | None:
    """What the user says: the memory, or the GPU's name. None where they say nothing. Raises ConfigError."""
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
    """What the allocation has.

    `local`: name and MiB of each GPU here, by nvidia-smi. `types`: node -> types of its GPUs in Slurm's words, as far
    as Slurm has any. Where they differ, the smallest counts.
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
        return GpuSize(0, notes=(f"{why}: {TELL}",))
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
    """The table knows what CUDA leaves of a GPU, but nvidia-smi, which size it is."""
    gpu, memory = find_gpu(name), mib * (1 << 20)
    if gpu is not None and abs(gpu.memory_gib * GIB - memory) < 0.05 * memory:
        return GpuSize(int(gpu.memory_gib * GIB), gpu.name, gpu=gpu)
    return GpuSize(int(memory * _USABLE), f"{name} of {mib / 1024:.0f} GB", gpu=gpu)


def _of_table(gpu: Gpu, name: str) -> GpuSize:
    other = other_size(name)
    notes = (f"{name} is taken for {gpu.name}; where it has {other} GB, say --train.gpu_memory_gb={other}",)
    return GpuSize(int(gpu.memory_gib * GIB), gpu.name, notes if other else (), gpu)
