"""What a reward function prints is in a file of the run, and not in the progress display."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from waiting import HANG_S

from slurm_rlhf.errors import RewardError
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.model import Scoring, printed_to


def test_a_function_that_prints_does_so_into_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text(
        "import sys\n\ndef reward_func(responses, step):\n"
        "    print('step', step, flush=True)\n    print('careful', file=sys.stderr)\n"
        "    if step == 2:\n        raise ValueError('no')\n    return []\n"
    )
    before = sys.stdout, sys.stderr
    scoring = Scoring(RewardFunction.load(str(tmp_path / "reward.py")), 20.0, tmp_path / "reward.log")
    scoring([], [], 1)
    with pytest.raises(RewardError, match="ValueError: no"):
        scoring([], [], 2)
    printed = (tmp_path / "reward.log").read_text()
    assert printed.startswith("step 1\ncareful\nstep 2\ncareful\nTraceback")
    assert "ValueError: no" in printed
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("", "")
    Scoring(RewardFunction.load(str(tmp_path / "reward.py")), 20.0)([], [], 3)
    assert capsys.readouterr().out == "step 3\n"


def test_other_threads_print_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def work(name: str) -> None:
        with printed_to(tmp_path / name):
            print("mine", name)
            inside.set()
            leave.wait(HANG_S)
            print("mine again")

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    inside.wait(HANG_S)
    print("the display")
    assert sys.stdout.isatty() is False
    leave.set()
    for thread in threads:
        thread.join(HANG_S)
    assert capsys.readouterr().out == "the display\n"
    assert [(tmp_path / name).read_text() for name in "ab"] == ["mine a\nmine again\n", "mine b\nmine again\n"]
