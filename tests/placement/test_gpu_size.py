"""How much memory the GPUs have: by what the user says, by nvidia-smi, by Slurm's types."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.cluster.gpu_query import local_kinds
from slurm_rlhf.cluster.slurm_job import gpu_types, granted_types, parse_types
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.placement.gpus import found_size, size_by_keys

DETAILS = """JobId=12 JobName=x
   JOB_GRES=gpu:a100:12
     Nodes=gpu[001-002] CPU_IDs=0-63 Mem=0 GRES=gpu:a100:4(IDX:0-3)
     Nodes=gpu003 CPU_IDs=0-31 Mem=0 GRES=gpu:v100:4(IDX:0-1,6-7),nic:1
     Nodes=cpu001 CPU_IDs=0-31 Mem=0 GRES=
   TresPerNode=gres/gpu:4
"""


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("8", []),
        ("gpu:8", []),
        ("gpu", []),
        ("a100:4", ["a100"]),
        ("gpu:a100:4(S:0-1)", ["a100"]),
        ("gres/gpu:h100_80gb=4", ["h100_80gb"]),
        ("gres:gpu:2", []),
        ("a100:4,v100:2", ["a100", "v100"]),
        ("gpu:nvidia_a100-sxm4-80gb:8(IDX:0,2-7)", ["nvidia_a100-sxm4-80gb"]),
        ("cpu=4,mem=8G,gres/gpu:a100=1,gres/shard:2,nic:1", ["a100"]),
    ],
)
def test_types_in_slurms_words(text: str, types: list[str]) -> None:
    assert gpu_types(text) == types


def test_types_of_an_allocation() -> None:
    assert parse_types(DETAILS) == {"gpu001": ["a100"], "gpu002": ["a100"], "gpu003": ["v100"]}
    assert parse_types("") == {}


def test_scontrol_is_asked_in_an_allocation(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    (tmp_path / "details").write_text(DETAILS)
    program.write_text(
        f'#!/bin/sh\n[ "$*" = "show job --details 12" ] && exec /bin/cat {tmp_path / "details"}\nexit 1\n'
    )
    program.chmod(0o755)
    environ = {"SLURM_JOB_ID": "12", "PATH": str(tmp_path), "SLURM_GPUS_PER_NODE": "h100:8"}
    assert granted_types(environ) == {"gpu001": ["a100"], "gpu002": ["a100"], "gpu003": ["v100"]}
    assert granted_types(environ | {"SLURM_JOB_ID": "13"}) == {"SLURM_GPUS_PER_NODE": ["h100"]}


def test_without_scontrol_what_was_asked_for_is_taken(tmp_path: Path) -> None:
    asked = {"SLURM_JOB_ID": "1", "SLURM_GPUS_PER_NODE": "h100:8", "PATH": str(tmp_path)}
    assert granted_types(asked) == {"SLURM_GPUS_PER_NODE": ["h100"]}
    assert granted_types({"PATH": str(tmp_path)}) == {}
    assert local_kinds({"PATH": str(tmp_path)}) == []


def test_the_user_knows_best() -> None:
    assert size_by_keys("", 0.0) is None
    by_name, by_size = size_by_keys("h100", 0.0), size_by_keys("", 80.0)
    assert by_name is not None
    assert by_size is not None
    assert by_name.gib == pytest.approx(79.1, abs=0.01)
    assert 78 < by_size.gib < 80
    both = size_by_keys("my_own", 48.0)
    assert both is not None
    assert both.name == "my_own of 48 GB"
    with pytest.raises(ConfigError, match=r"'my_own' is no GPU that is known here.*H100 PCIe, "):
        size_by_keys("my_own", 0.0)


def test_one_kind() -> None:
    smi = [("NVIDIA A100-SXM4-40GB", 40960.0)] * 4
    found = found_size(smi, {"gpu001": ["a100"], "gpu002": ["a100"]})
    assert (found.name, found.notes) == ("A100 40GB", ())
    assert found.gib == pytest.approx(39.3, abs=0.01)
    unknown = found_size([("NVIDIA Z999", 100_000.0)], {})
    assert unknown.gib == pytest.approx(96.2, abs=0.1)
    typed = found_size([], {"gpu001": ["nvidia_h100_80gb_hbm3"]})
    assert (typed.name, typed.notes) == ("H100", ())


def test_a_bare_type_may_mean_two_sizes_and_that_is_said() -> None:
    (note,) = found_size([], {"gpu001": ["a100"]}).notes
    assert note == "a100 is taken for A100 80GB; where it has 40 GB, say --train.gpu_memory_gb=40"


def test_unlike_sizes_count_as_the_smallest() -> None:
    found = found_size([("NVIDIA A100-SXM4-80GB", 81920.0)], {"gpu001": ["a100"], "gpu003": ["v100_32gb"]})
    assert found.name == "V100 32GB"
    (note,) = found.notes
    assert note.startswith("GPUs of unlike size: A100 80GB (79.1 GiB), V100 32GB (31.7 GiB). The smallest counts")


def test_what_is_not_known_is_one_line() -> None:
    for found in (found_size([], {}), found_size([], {"gpu001": ["titan_x"]})):
        assert found.memory == 0
        (note,) = found.notes
        assert "--train.gpu=NAME" in note
        assert "\n" not in note
    assert "titan_x (gpu001)" in found.notes[0]
