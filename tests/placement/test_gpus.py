"""GPUs are found by the names that drivers, PyTorch and Slurm's administrators give them."""

from __future__ import annotations

import pytest

from slurm_rlhf.placement.gpus import GPUS, find_gpu, other_size

NAMES = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H100 SXM5 64GB": "H100 64GB",
    "nvidia_h100_80gb_hbm3": "H100",
    "nvidia_h100_pcie": "H100 PCIe",
    "h100_80gb": "H100",
    "h100-94": "H100 NVL",
    "h100": "H100",
    "h100nvl": "H100 NVL",
    "h100sxm": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "nvidia_h200": "H200",
    "NVIDIA H20": "H20",
    "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144GB",
    "gh200": "GH200 96GB",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB",
    "A100-SXM-64GB": "A100 64GB",
    "nvidia_a100-sxm4-40gb": "A100 40GB",
    "a100": "A100 80GB",
    "a100_80": "A100 80GB",
    "a100_40": "A100 40GB",
    "a100-40g": "A100 40GB",
    "a100l": "A100 80GB",
    "NVIDIA A40": "A40",
    "NVIDIA A30": "A30",
    "NVIDIA A10G": "A10G",
    "NVIDIA A10": "A10",
    "NVIDIA L40S": "L40S",
    "l40s": "L40S",
    "NVIDIA L40": "L40",
    "NVIDIA L4": "L4",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "rtx6000ada": "RTX 6000 Ada",
    "nvidia_rtx_6000_ada_generation": "RTX 6000 Ada",
    "Quadro RTX 6000": "Quadro RTX 6000",
    "NVIDIA RTX A6000": "RTX A6000",
    "rtx_a6000": "RTX A6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Blackwell",
    "rtx_pro_6000": "RTX PRO 6000 Blackwell",
    "Tesla V100-SXM2-16GB": "V100 16GB",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "v100": "V100 32GB",
    "Tesla V100S-PCIE-32GB": "V100 32GB",
    "Tesla T4": "T4",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "AMD Instinct MI250X": "MI250X, one of its two dies",
    "mi250": "MI250, one of its two dies",
    "AMD Instinct MI300X": "MI300X",
    "mi300a": "MI300A",
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.name == NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpu",
        "alien",
        "NVIDIA A4000",
        "h1000",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "a100_1g.5gb",
        "1g.10gb",
        "t400",
    ],
)
def test_strangers_and_slices_are_nobody(name: str) -> None:
    assert find_gpu(name) is None
    assert other_size(name) == 0


def test_a_name_without_a_size_may_mean_another() -> None:
    assert {name: other_size(name) for name in ("a100", "NVIDIA A100-SXM4-80GB", "a100_80", "v100", "h100")} == {
        "a100": 40,
        "NVIDIA A100-SXM4-80GB": 0,
        "a100_80": 0,
        "v100": 16,
        "h100": 0,
    }


def test_every_kind_is_found_by_its_own_name() -> None:
    assert [gpu.name for gpu in GPUS if find_gpu(gpu.name) is not gpu] == []


@pytest.mark.parametrize(
    ("name", "memory_gb", "peak"),
    [("H100", 80, 989.4), ("A100 80GB", 80, 312.0), ("H200", 141, 989.4), ("A100 40GB", 40, 312.0), ("L40S", 48, 362)],
)
def test_memory_is_a_little_less_than_what_is_sold(name: str, memory_gb: int, peak: float) -> None:
    gpu = find_gpu(name)
    assert 0.92 * memory_gb < gpu.memory_gib < memory_gb
    assert gpu.bf16_tflops == peak
