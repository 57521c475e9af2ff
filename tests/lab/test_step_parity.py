"""Parameters after whole optimizer steps, by architecture and way of computing, are those of plain PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import step_parity
from waiting import scaled

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(2400)]


def test_all_architectures_and_ways() -> None:
    command = [sys.executable, step_parity.__file__, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=scaled(2300), check=False)
    found = json.loads(done.stdout)
    print(step_parity.show(found))
    assert found.keys() == set(step_parity.NAMED)
    for arch, row in found.items():
        assert row.keys() == step_parity.ways(arch).keys()
        assert {way: gap for way, gap in row.items() if gap > step_parity.BOUND} == {}, arch
    assert done.returncode == 0
