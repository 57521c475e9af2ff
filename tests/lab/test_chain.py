"""A whole pipeline on the quickstart's task, as `stage_chain.py` runs it; what it finds is what the pages promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import stage_chain


@pytest.mark.full  # each of its commands has a shorter test
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_ppo_learns_what_a_reward_model_prefers_and_a_student_what_its_teacher_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "input").mkdir()
    subprocess.run(
        [sys.executable, str(stage_chain.ROOT / "sbatch" / "quickstart_data.py"), str(tmp_path / "input")], check=True
    )
    found = stage_chain.measure(tmp_path / "input", tmp_path / "chain")
    print(stage_chain.show(found))
    shares = found["shares"]
    assert found["rm"]["eval/accuracy"] > 0.95
    assert shares["pupil_rounded"] < 0.2
    assert shares["ppo_rounded"] > 0.9
    assert shares["pupil_right"] < 0.7
    assert shares["teacher_right"] > 0.99
    assert shares["student_right"] > shares["teacher_right"] - 0.02
