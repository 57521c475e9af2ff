"""What nodes answer before a run, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_rlhf.errors import ConfigError, PlacementError
from slurm_rlhf.launch.preflight import judge
from slurm_rlhf.launch.probe import answer, versions

NODES = ("n1", "n2", "n3")
HERE = {"python": "3.11.7", "torch": "2.13.0"}


def said(**changes: Any) -> dict[str, Any]:
    return {"canary": "token", "writable": True, "versions": dict(HERE), **changes}


def judged(answers: dict[str, dict[str, Any]], words: str = "") -> None:
    judge(answers, NODES, Path("/runs/a"), "token", HERE, words)


def test_nodes_that_are_alike_pass() -> None:
    judged({node: said() for node in NODES})


@pytest.mark.parametrize(
    ("odd", "error", "expected"),
    [
        (said(canary=""), ConfigError, "run_dir /runs/a is not shared by all nodes: n2 cannot see what n1, n3 wrote"),
        (said(canary="old"), ConfigError, "not shared by all nodes: n2"),
        (said(writable=False), ConfigError, "cannot be written on n2"),
        (said(versions={**HERE, "torch": "2.12.0"}), ConfigError, "n2: torch 2.12.0, here 2.13.0"),
        (said(versions={"python": "3.11.7"}), ConfigError, "n2: torch None, here 2.13.0"),
    ],
)
def test_the_odd_one_out_is_named(odd: dict[str, Any], error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        judged({"n1": said(), "n2": odd, "n3": said()})


def test_a_node_that_does_not_answer_is_named_with_what_srun_says() -> None:
    words = "slurmstepd: error: execve(): /opt/venv/bin/python: No such file or directory"
    with pytest.raises(PlacementError) as caught:
        judged({"n1": said()}, words)
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["no answer from n2, n3; srun says:", f"    {words}"]  # Slurm's reason comes first
    assert lines[2].startswith("If that names nothing to mend: ")
    assert lines[2].endswith("leave a broken node out with sbatch --exclude.")
    with pytest.raises(PlacementError, match=r"^no answer from n1, n2, n3\nIf that names"):
        judged({})


def test_a_node_reads_the_canary_and_the_versions(tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("token")
    there = answer(tmp_path / "canary")
    assert there["canary"] == "token"
    assert there["writable"] is True
    assert there["versions"] == versions()
    assert versions()["numpy"][0].isdigit()
    assert answer(tmp_path / "none", wait_s=0)["canary"] == ""
