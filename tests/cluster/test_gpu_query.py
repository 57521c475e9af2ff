"""What nvidia-smi and the driver's library say, read without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_smi import card, write_smi
from waiting import HANG_S

from slurm_rlhf.cluster.gpu_query import (
    ask_gpus,
    driver_cuda,
    is_busy,
    local_gpus,
    parse_gpus,
    share_gpus,
    with_processes,
)


def asked(directory: Path) -> dict[str, str]:
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def test_cards_processes_driver_and_cuda(tmp_path: Path) -> None:
    cards = [card(0, used=40123), card(1, "NVIDIA A100-SXM4-80GB", 81920, mig="[N/A]")]
    mine = f"{cards[0].split(', ')[1]}, {os.getpid()}, /opt/my python, 40100"
    write_smi(tmp_path, cards, [mine, "GPU-of-another-job, 7, python, [N/A]"], cuda="13.0")
    look = ask_gpus(asked(tmp_path))
    assert [(gpu.index, gpu.name, gpu.memory_mib, gpu.used_mib, gpu.mig) for gpu in look.gpus] == [
        (0, "NVIDIA H100 80GB HBM3", 81559, 40123, False),
        (1, "NVIDIA A100-SXM4-80GB", 81920, 4, False),
    ]
    (process,) = look.gpus[0].processes
    assert (process.pid, process.name, process.memory_mib) == (os.getpid(), "/opt/my python", 40100)
    assert process.user  # this process's own
    assert [is_busy(gpu) for gpu in look.gpus] == [True, False]
    assert (look.driver, look.cuda, look.said) == ("580.95.05", driver_cuda(), "")
    assert [gpu.index for gpu in look.chosen(("1", "0"))] == [1, 0]
    assert [gpu.index for gpu in look.chosen((cards[1].split(", ")[1][:12], "7"))] == [1]


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        ("No devices were found\n", 0, "nvidia-smi shows none: No devices were found"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest\n"
            "NVIDIA driver is installed and running.\n",
            9,
            "nvidia-smi fails: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver",
        ),
        ("Failed to initialize NVML: Driver/library version mismatch\n", 18, "version mismatch"),
        ('Field "uuid" is not a valid field to query.\n', 0, "not an answer to --query-gpu"),
    ],
)
def test_without_cards_the_programs_own_words_are_kept(tmp_path: Path, said: str, code: int, expected: str) -> None:
    write_smi(tmp_path, said=said, code=code)
    look = ask_gpus(asked(tmp_path))
    assert look.gpus == ()
    assert expected in look.said
    assert "is not on PATH" in ask_gpus({"PATH": "/nowhere"}).said


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="not an answer to --query-gpu"):
        parse_gpus("0, GPU-1, H100\n")
    with pytest.raises(ValueError, match="not an answer to --query-compute-apps"):
        with_processes(parse_gpus(card(0)), "GPU-1, 5\n")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a library")
def test_the_drivers_library_is_asked_which_cuda_it_runs(tmp_path: Path) -> None:
    (tmp_path / "cuda.c").write_text("int cuDriverGetVersion(int *v) { *v = 12040; return 0; }\n")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "cuda.c")], check=True, timeout=HANG_S
    )
    assert driver_cuda(str(library)) == "12.4"
    assert driver_cuda(str(tmp_path / "none.so")) == ""


def test_ranks_take_the_gpus_in_turns_and_pass_for_hosts_where_they_are_too_many(tmp_path: Path) -> None:
    write_smi(tmp_path, [card(0), card(1)])
    gpus = local_gpus(asked(tmp_path))
    assert gpus == ("0", "1")
    assert share_gpus(["a", "b"], gpus) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    crowded = share_gpus(["a", "a", "b"], gpus)
    assert [seat["CUDA_VISIBLE_DEVICES"] for seat in crowded] == ["0", "1", "0"]
    assert len({seat["NCCL_HOSTID"] for seat in crowded}) == 3
    apart = share_gpus(["a", "a", "b"], gpus, one_machine=False)
    assert apart == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "0"}]
    assert share_gpus(["a", "b"], ()) == [{}, {}]
