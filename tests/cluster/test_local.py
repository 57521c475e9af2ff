"""Facts of one machine: its GPUs, its addresses, and directories that only it sees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from gpu_smi import card, write_smi
from programs import write_program
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
from slurm_rlhf.cluster.local_directory import take_directory, take_temporary
from slurm_rlhf.cluster.network import link_mbits
from slurm_rlhf.cluster.processes import Session, read_session
from slurm_rlhf.cluster.resources import local_topology
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import role_sizes


def nvidia_smi(folder: Path, gpus: int, code: int = 0) -> dict[str, str]:
    """An environment whose PATH holds an nvidia-smi that lists `gpus` GPUs."""
    lines = "\n".join(
        f"GPU {i}: NVIDIA H200 (UUID: GPU-{i}{i})\n  MIG 1g.18gb Device 0: (UUID: MIG-{i})" for i in range(gpus)
    )
    (folder / "list").write_text(lines + "\n")
    write_program(folder / "nvidia-smi", f'#!/bin/sh\n[ "$1" = -L ] && cat {folder}/list\nexit {code}\n')
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_without_gpus_a_slot_is_a_process(tmp_path: Path) -> None:
    config = Config()
    config.actor.num_gpus_per_node = 3
    config.vllm.num_engines = 2
    config.vllm.tensor_parallel_size = 2
    environ = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}  # a leftover: there is no GPU
    topology = local_topology(config, environ=environ)
    assert topology.accelerator == "cpu"
    assert [node.gpus for node in topology.nodes] == [3 + 1 + 1 + 4]
    assert place(topology, role_sizes(config)).worlds == {"actor": 3, "critic": 1, "reference": 1, "rollout": 4}
    config.algo.kl.init_coef = 0.0
    assert "reference" not in place(local_topology(config, environ=environ), role_sizes(config)).roles


def test_with_gpus_the_real_number(tmp_path: Path) -> None:
    environ = nvidia_smi(tmp_path, 8)
    topology = local_topology(Config(), environ={**environ, "CUDA_VISIBLE_DEVICES": "7,5,3,1"})
    assert topology.accelerator == "gpu"
    assert topology.nodes[0].gpus == 4
    assert topology.nodes[0].visible([1, 2]) == "5,3"


def test_fewer_gpus_than_needed(tmp_path: Path) -> None:
    config = Config()
    config.actor.num_gpus_per_node = 4
    with pytest.raises(PlacementError, match=r"(?s)need 7 GPUs.*actor.num_gpus_per_node = 4.*CUDA_VISIBLE_DEVICES="):
        local_topology(config, environ=nvidia_smi(tmp_path, 4))
    config.train.colocate_actor_ref = True
    config.actor.num_gpus_per_node = 1
    assert local_topology(config, nvidia_smi(tmp_path, 3)).slots == 3


def test_several_nodes_outside_an_allocation(tmp_path: Path) -> None:
    config = Config()
    config.actor.num_nodes = 2
    config.vllm.num_nodes = 4
    config.vllm.num_engines = 4
    message = r"actor.num_nodes = 2, vllm.num_nodes = 4, but this is not a Slurm allocation.*sbatch --nodes=4"
    with pytest.raises(PlacementError, match=message):
        local_topology(config, environ={"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2", ("2",)),
        ("3, 0", ("3", "0")),
        ("1,9,2", ("1",)),  # CUDA hides what follows an index that does not exist
        ("1,1", ("1",)),
        ("GPU-11,MIG-2", ("GPU-11", "MIG-2")),
    ],
)
def test_cuda_visible_devices(tmp_path: Path, chosen: str | None, visible: tuple[str, ...]) -> None:
    environ = nvidia_smi(tmp_path, 4)
    if chosen is not None:
        environ["CUDA_VISIBLE_DEVICES"] = chosen
    assert local_gpus(environ) == visible


def test_the_drivers_directory_where_nvidia_smi_does_not_answer(tmp_path: Path) -> None:
    proc = tmp_path / "gpus"
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (proc / bus).mkdir(parents=True)
    assert local_gpus({"PATH": str(tmp_path)}, proc) == ("0", "1")
    assert local_gpus(nvidia_smi(tmp_path, 3, code=9), proc) == ("0", "1")
    assert local_gpus({"PATH": "/nonexistent"}, tmp_path / "missing") == ()


# --- local directory --------------------------------------------------------------------------------------------------


HOLD = """
import sys
from pathlib import Path
from slurm_rlhf.cluster.local_directory import take_directory
print(take_directory("other", Path(sys.argv[1])).path, flush=True)
import os
os.execvp("sleep", ["sleep", "60"])
"""


def test_a_directory_lasts_as_long_as_its_process_and_what_that_becomes(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            theirs = Path(other.stdout.readline().strip())
            assert theirs.is_dir()
            (theirs / "kernel").write_text("compiled")
            mine = take_directory("mine", tmp_path).path
            assert theirs.is_dir()
        finally:
            other.kill()
    take_directory("next", tmp_path)
    assert not theirs.exists()
    assert mine.is_dir()
    assert mine.parent.stat().st_mode & 0o077 == 0


def test_a_directory_that_somebody_else_put_there_is_not_used(tmp_path: Path) -> None:
    planted = tmp_path / "elsewhere"
    planted.mkdir()
    (tmp_path / f"slurm_rlhf.{os.getuid()}").symlink_to(planted)
    own = take_directory("mine", tmp_path).path
    assert planted not in own.resolve().parents
    assert list(planted.iterdir()) == []


@pytest.mark.parametrize("length", [0, 80])
def test_a_directory_for_sockets_has_a_short_path_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """vLLM puts names of 37 characters behind it, and a socket's path has 107 at most."""
    place = tempfile.mkdtemp(prefix="t") if not length else str(tmp_path / ("x" * length))
    Path(place).mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", place)
    made = take_temporary()
    assert made.path.stat().st_uid == os.getuid()
    assert len(str(made.path)) + 37 <= 107
    assert str(made.path).startswith("/tmp/slurm_rlhf." if length else place)
    (made.path / "socket").touch()
    if length:  # the node's own cleaning comes first
        shutil.rmtree(made.path)
    made.remove()
    assert not made.path.exists()
    assert [path.name for path in made.path.parent.iterdir() if path.name[0] == "."] == [".lock"]


# --- network ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "mbits"),
    [
        *(("eth0", 25_000), ("eth1", 0), ("lo", 0), ("gone", 0), ("", 0), ("ib0", 200_000), ("ib0,ib1", 400_000)),
        ("ib0,eth1", 0),  # all of several links must be known
    ],
)
def test_the_speed_of_a_link(tmp_path: Path, names: str, mbits: int) -> None:
    """Ethernet up and down, InfiniBand, and an interface without any speed."""
    for name in ("eth0", "eth1", "lo"):
        (tmp_path / name).mkdir()
    (tmp_path / "eth0" / "speed").write_text("25000\n")
    (tmp_path / "eth1" / "speed").write_text("-1\n")
    for name in ("ib0", "ib1"):
        port = tmp_path / name / "device" / "infiniband" / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert link_mbits(names, tmp_path) == mbits
    assert link_mbits("lo") == 0


# --- gpu query --------------------------------------------------------------------------------------------------------


def asked(directory: Path) -> dict[str, str]:
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def test_cards_processes_driver_and_cuda(tmp_path: Path) -> None:
    cards = [card(0, used=40123), card(1, "NVIDIA A100-SXM4-80GB", 81920, used=4000, mig="[N/A]")]
    mine = f"{cards[0].split(', ')[1]}, {os.getpid()}, /opt/my python, 40100"
    write_smi(tmp_path, cards, [mine, "GPU-of-another-job, 7, python, [N/A]"], cuda="13.0")
    look = ask_gpus(asked(tmp_path))
    assert [(gpu.index, gpu.name, gpu.memory_mib, gpu.used_mib, gpu.mig) for gpu in look.gpus] == [
        (0, "NVIDIA H100 80GB HBM3", 81559, 40123, False),
        (1, "NVIDIA A100-SXM4-80GB", 81920, 4000, False),
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
    assert [gpu_environment["CUDA_VISIBLE_DEVICES"] for gpu_environment in crowded] == ["0", "1", "0"]
    assert len({gpu_environment["NCCL_HOSTID"] for gpu_environment in crowded}) == 3
    apart = share_gpus(["a", "a", "b"], gpus, one_machine=False)
    assert apart == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "0"}]
    assert share_gpus(["a", "b"], ()) == [{}, {}]


def test_a_session_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_session(tmp_path) is None
    step = {"SLURM_JOB_ID": "13", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_ARRAY_JOB_ID": "12"}
    session = Session.here({**step, "SLURM_ARRAY_TASK_ID": "3"})
    session.write(tmp_path)
    assert read_session(tmp_path) == session
    assert (session.job_id, session.task, session.first_node) == ("13", "12_3", "n1")
