"""The speed of a network interface, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.cluster.network import link_mbits, user_name


@pytest.fixture
def interfaces(tmp_path: Path) -> Path:
    """Ethernet up and down, InfiniBand, and an interface without any speed."""
    for name in ("eth0", "eth1", "lo"):
        (tmp_path / name).mkdir()
    (tmp_path / "eth0" / "speed").write_text("25000\n")
    (tmp_path / "eth1" / "speed").write_text("-1\n")
    for name in ("ib0", "ib1"):
        port = tmp_path / name / "device" / "infiniband" / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "mbits"),
    [("eth0", 25_000), ("eth1", 0), ("lo", 0), ("gone", 0), ("", 0), ("ib0", 200_000), ("ib0,ib1", 400_000)],
)
def test_the_speed_of_a_link(interfaces: Path, names: str, mbits: int) -> None:
    assert link_mbits(names, interfaces) == mbits


def test_of_several_links_all_must_be_known(interfaces: Path) -> None:
    assert link_mbits("ib0,eth1", interfaces) == 0


def test_the_loopback_interface_has_none() -> None:
    assert link_mbits("lo") == 0


def test_a_user_without_a_name_is_a_number() -> None:
    assert user_name(0) == "root"
    assert user_name(2**31 - 7) == str(2**31 - 7)
