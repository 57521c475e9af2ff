"""A node's account of itself: real files, limits; a kernel that refuses locks; recorded answers of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import write_program
from waiting import HANG_S

from slurm_rlhf.cluster.gpu_query import ask_health, parse_health
from slurm_rlhf.nodes import examiner
from slurm_rlhf.nodes.examiner import collect, left_locks, no_compiler
from slurm_rlhf.nodes.facts import UNKNOWN, Orders
from slurm_rlhf.nodes.node_look import MISSING, versions

WITHOUT_LOCKS = Path(__file__).parents[1] / "support" / "without_locks.py"


def orders(run_dir: Path, *places: tuple[str, str]) -> Orders:
    return Orders("", "127.0.0.1", 0, str(run_dir), 1.0, 20.0, canary=str(run_dir / "canary"), places=places)


def test_a_good_machine(tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("token")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    asked = orders(tmp_path, ("actor.model_name_or_path", str(tmp_path / "model")), ("data.prompt_dataset", "/none"))
    found = collect(asked, "n1", {"NCCL_SOCKET_IFNAME": "lo"})
    assert (found.canary, found.run_dir, found.shm) == ("token", "", "")
    assert [place.problem for place in found.places] == ["", "No such file or directory"]
    assert found.versions == versions()
    assert found.versions["numpy"] != MISSING
    assert abs(found.clock - time.time()) < 60
    assert (found.interface, found.subnet) == ("lo", "127.0.0.0/8")
    assert found.exported == ()
    assert found.free_bytes > 0
    assert found.most_files == UNKNOWN or found.most_files > 0
    assert [file.name for file in tmp_path.iterdir() if "preflight" in file.name] == []


@pytest.mark.slow
def test_what_a_bad_machine_lacks(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    asked = orders(tmp_path / "none")
    found = collect(asked, "n1", {"GLOO_SOCKET_IFNAME": "ib77"}, shm=tmp_path / "no_shm")
    assert found.canary == ""
    assert found.run_dir == "No such file or directory"
    assert found.shm == "No such file or directory"
    assert found.exported[0].startswith("GLOO_SOCKET_IFNAME=ib77, and its interfaces are ")


@pytest.mark.slow
def test_infiniband_is_there_where_the_kernel_lists_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examiner, "_INFINIBAND", tmp_path / "infiniband")
    found = [collect(orders(tmp_path), "n1", {}).infiniband]
    (tmp_path / "infiniband").mkdir()  # InfiniBand's modules are loaded, and there is no card
    found.append(collect(orders(tmp_path), "n1", {}).infiniband)
    (tmp_path / "infiniband" / "mlx5_0").mkdir()
    found.append(collect(orders(tmp_path), "n1", {}).infiniband)
    assert found == [False, False, True]


def test_what_is_missing_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_compiler({"PATH": str(tmp_path)}) == "no C compiler: neither gcc nor clang is on PATH, and CC is not set"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    compiler = {"PATH": str(tmp_path), "CC": "cc"}
    assert no_compiler(compiler) == f"no headers of Python: {tmp_path}/Python.h is missing"
    (tmp_path / "Python.h").touch()
    assert no_compiler(compiler) == ""


@pytest.mark.slow
def test_locks_of_torch_extensions_that_nobody_builds(tmp_path: Path) -> None:
    """Made as torch makes them; where torch has them."""
    from torch.utils.cpp_extension import _get_build_directory
    from torch.utils.file_baton import FileBaton

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        usual = Path(_get_build_directory("usual", verbose=False), "lock")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "chosen"))
        chosen = Path(_get_build_directory("chosen", verbose=False), "lock")
    stated = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for lock, environ in ((usual, stated), (chosen, stated | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "chosen")})):
        assert left_locks(environ) == ()
        baton = FileBaton(str(lock))
        assert baton.try_acquire()
        assert left_locks(environ) == (), "its builder lives"
        os.close(baton.fd)
        assert left_locks(environ) == (str(lock),)


def test_a_file_system_without_locks(tmp_path: Path) -> None:
    """The kernel refuses flock: the conductor goes on with a warning."""
    code = (
        "import sys; from pathlib import Path\n"
        "from slurm_rlhf.groups.run_lock import exclusive\n"
        "from slurm_rlhf.run_directory import RunDirectory\n"
        "directory = RunDirectory(Path(sys.argv[1])); directory.make()\n"
        "with exclusive(directory): print('it runs')\n"
    )
    command = [sys.executable, str(WITHOUT_LOCKS), sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    warning = f"warning: {tmp_path} cannot be locked (Operation not supported): start no second run in it"
    assert done.stdout.splitlines() == [warning, "it runs"], done


HEALTH = """0, GPU-00000000-1111, 0, No, Not Active, Not Active, Not Active
1, GPU-00000001-1111, 7, Yes, Active, Active, Not Active
2, GPU-00000002-1111, [N/A], [N/A], Not Active, Not Active, Active
"""


def test_ill_gpus() -> None:
    stated = [
        "GPU 1: 7 uncorrected ECC errors since the driver was loaded",
        "GPU 1: pages of its memory wait to be retired by a reset",
        "GPU 1: its clocks are lowered, it is too hot",
    ]
    assert parse_health(HEALTH, ("0", "1")) == stated
    assert parse_health(HEALTH, ("GPU-00000002",)) == ["GPU 2: its clocks are lowered, the power supply limits it"]
    assert parse_health("No devices were found\n", ("0",)) == []


def test_the_program_of_the_driver_is_asked(tmp_path: Path) -> None:
    text = (
        '#!/bin/bash\nif [[ $1 == -L ]]; then echo "GPU 0: H100 (UUID: GPU-0)"; exit; fi\n'
        'echo "0, GPU-0, 3, No, Not Active, Not Active, Not Active"\n'
    )
    environ = {"PATH": f"{write_program(tmp_path / 'nvidia-smi', text).parent}:{os.environ['PATH']}"}
    assert ask_health(environ) == ["GPU 0: 3 uncorrected ECC errors since the driver was loaded"]
    assert ask_health({"PATH": str(tmp_path / "none")}) == []
