"""Node lists: the committed vectors of scontrol always, scontrol itself where it is installed, and the errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from slurm_rlhf.cluster.slurm_notation import MAX_RANGE, expand, gpus_of_nodes, slurm_order
from slurm_rlhf.errors import PlacementError

VECTORS = json.loads((Path(__file__).parents[1] / "support" / "nodelist_vectors.json").read_text())


def test_committed_vectors() -> None:
    assert len(VECTORS["valid"]) > 300
    for text, names in VECTORS["valid"].items():
        assert expand(text) == names, text


@pytest.mark.parametrize("text", VECTORS["invalid"])
def test_committed_invalid_lists(text: str) -> None:
    with pytest.raises(PlacementError, match="invalid node list"):
        expand(text)


def make_bracket(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 3)):
        low = rng.choice((0, 1, 8, 9, 98, 99, rng.randint(0, 12345), rng.randint(0, 10**9)))
        width = rng.choice((0, 1, 2, 3, 5, 9))
        high = low + rng.choice((0, 1, 2, rng.randint(0, 20)))
        padded = str(low).zfill(width)
        parts.append(padded if rng.random() < 0.3 else f"{padded}-{str(high).zfill(rng.choice((0, width)))}")
    return f"[{','.join(parts)}]"


def make_element(rng: random.Random) -> str:
    text = rng.choice(("gpu", "n", "login1", "rack-2_", "a.b.c-", "c001-", "", "0", "lrdn"))
    for index in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        text += rng.choice(("", "-n", "x1_")) * (index > 0) + make_bracket(rng)
    return text or "x"


def make_list(rng: random.Random) -> str:
    separators = (",", ",", ",", ",,", " ", ", ")
    elements = [make_element(rng) for _ in range(rng.randint(1, 6))]
    return elements[0] + "".join(rng.choice(separators) + element for element in elements[1:])


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which `scontrol show hostnames` works without a cluster."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed: compared with the committed vectors only (Debian: slurm-client)")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nAuthType=auth/none\nNodeName=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    if hostnames("a[1-2]", environ) != ["a1", "a2"]:
        pytest.skip("scontrol does not run here, not even on a[1-2]")
    return environ


def hostnames(text: str, environ: dict[str, str]) -> list[str]:
    command = ["scontrol", "show", "hostnames", text]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False
    ).stdout.split()


@pytest.mark.slow
def test_4000_lists_equal_to_scontrol(scontrol: dict[str, str]) -> None:
    rng = random.Random(7)
    for _ in range(100):
        lists = [make_list(rng) for _ in range(40)]
        joined = ",".join(lists)
        assert [name for text in lists for name in expand(text)] == hostnames(joined, scontrol), joined


@pytest.mark.parametrize(
    ("text", "position", "what"),
    [
        ("gpu[001-003", 12, "expected"),
        ("gpu001,gpu[3-1]", 12, "runs backwards"),
        ("gpu[1,,2]", 7, "number is missing"),
        ("gpu[]", 5, "number is missing"),
        ("gpu[1-]", 6, "expected"),
        ("gpu[a-c]", 5, "number is missing"),
        ("gpu[1-2-3]", 8, "expected"),
        ("gpu[1, 2]", 7, "number is missing"),
        ("gpu]1", 4, "is not valid"),
        ("login,g;rm", 8, "is not valid"),
        ("gpu[001-002].cluster.local,b", 13, "after the last bracket"),
        (f"gpu[0-{MAX_RANGE}]", 5, "Slurm allows"),
        ("a[0-65535][0-99]", 1, "names in one element"),
    ],
)
def test_errors_point_at_the_character(text: str, position: int, what: str) -> None:
    where = "at its end" if position > len(text) else f"at character {position}:"
    with pytest.raises(PlacementError, match=what) as error:
        expand(text)
    message = str(error.value)
    assert where in message
    shown, pointer = message.splitlines()[-2:]
    assert shown[pointer.index("^") :] == text[position - 1 :][: len(shown) - pointer.index("^")]


SORTED = {
    "r01c[01-03],fat-[1-2]": "fat-1 fat-2 r01c01 r01c02 r01c03",
    "n10,n9,n1,n01,n002,n100": "n1 n9 n01 n10 n002 n100",
    "a,b10,b9,b,B1,a1": "B1 a a1 b b9 b10",
    "rack10-n1,rack9-n2,rack9-n10": "rack9-n2 rack9-n10 rack10-n1",
    "x-2,x1,x": "x x1 x-2",
    "gpu1-ib,gpu10-ib,gpu2-ib": "gpu1-ib gpu2-ib gpu10-ib",
}
"""List -> what `scontrol show hostlistsorted` of Slurm 22.05 makes of it."""


@pytest.mark.parametrize("text", SORTED)
def test_nodes_of_a_job_have_slurms_order(text: str) -> None:
    assert slurm_order(expand(text)) == SORTED[text].split()


@pytest.mark.parametrize("text", SORTED)
def test_that_order_is_scontrols(scontrol: dict[str, str], text: str) -> None:
    command = ["scontrol", "show", "hostlistsorted", text]
    done = subprocess.run(command, env=scontrol, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert expand(done.stdout.strip()) == SORTED[text].split()


FIVE = ["fat-1", "fat-2", "r01c01", "r01c02", "r01c03"]


@pytest.mark.parametrize(
    "text", ["6,6,4,4,4", "6(x2),4(x3)", "fat-[1-2]:6,r01c[01-03]:4", "r01c01,r01c[02-03]:4,fat-1:6,fat-2:6"]
)
def test_gpus_of_unlike_nodes(text: str) -> None:
    assert gpus_of_nodes(text, FIVE) == (6, 6, 4, 4, 4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("6,4", "2 counts for 5 nodes"),
        ("fat-[1-2]:6", "r01c01 has no number"),
        ("fat-[1-3]:6,r01c[01-03]:4", "fat-3 is not among the nodes"),
        ("fat-1:six", "expected NODES:GPUS, got 'fat-1:six'"),
        ("many", "expected counts like 8"),
    ],
)
def test_gpus_that_cannot_be_read(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gpus_of_nodes(text, FIVE)


@pytest.mark.parametrize("text", ["", " ", ",,"])
def test_a_list_without_a_node(text: str) -> None:
    with pytest.raises(PlacementError, match="names no node"):
        expand(text)


@given(st.text(alphabet="ab01-[],. \t]é", max_size=30))
def test_any_text_gives_names_or_our_error(text: str) -> None:
    try:
        names = expand(text)
    except PlacementError:
        return
    assert names
    assert all(name and not set(name) & set("[], \t") for name in names)
