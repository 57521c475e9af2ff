"""How much memory the GPUs have: by what the user says, by nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.cluster.gpu_query import local_kinds
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.placement.gpus import found_size, size_by_keys


def test_the_user_knows_best() -> None:
    assert size_by_keys("", 0.0) is None
    by_name, by_size = size_by_keys("h100", 0.0), size_by_keys("", 80.0)
    assert by_name.gib == pytest.approx(79.1, abs=0.01)
    assert 78 < by_size.gib < 80
    both = size_by_keys("my_own", 48.0)
    assert both.name == "my_own of 48 GB"
    with pytest.raises(ConfigError, match=r"train\.gpu: 'my_own' is no GPU that is known here.*H100 PCIe, "):
        size_by_keys("my_own", 0.0)


def test_one_kind() -> None:
    found = found_size([("NVIDIA A100-SXM4-40GB", 40960.0)] * 4)
    assert (found.name, found.notes) == ("A100 40GB", ())
    assert found.gib == pytest.approx(39.3, abs=0.01)
    assert found_size([("NVIDIA Z999", 100_000.0)]).gib == pytest.approx(96.2, abs=0.1)


def test_a_bare_name_may_mean_two_sizes_and_that_is_said() -> None:
    found = size_by_keys("a100", 0.0)
    assert found.notes == ("a100 is taken for A100 80GB; where it has 40 GB, say --train.gpu_memory_gb=40",)


def test_unlike_sizes_count_as_the_smallest() -> None:
    found = found_size([("NVIDIA A100-SXM4-80GB", 81920.0), ("Tesla V100-SXM2-32GB", 32768.0)])
    assert found.name == "V100 32GB"
    (note,) = found.notes
    assert note.startswith("GPUs of unlike size: A100 80GB (79.1 GiB), V100 32GB (31.7 GiB). The smallest counts")


def test_what_is_not_known_is_one_line(tmp_path: Path) -> None:
    assert local_kinds({"PATH": str(tmp_path)}) == []
    found = found_size([])
    assert found.memory == 0
    (note,) = found.notes
    assert "--train.gpu=NAME" in note
