"""Whole runs that a test makes hang and lets go again: in the reward, in a rank's Python, in C, in an engine.

Each place looks for a file of its name in a directory; the test makes it, and takes it away.
"""

from __future__ import annotations

import os
from pathlib import Path

REWARD = """
import time
from pathlib import Path

HOLD = Path(__file__).parent / "hold"

def reward_func(queries, prompts, labels, **kwargs):
    while (HOLD / "reward").exists():
        time.sleep(0.02)
    return [float(label in response) for label, response in zip(labels, kwargs["responses"])]
"""

PLUGIN = """
import ctypes
import os
import time
from pathlib import Path

import numpy as np

from slurm_rlhf import Algorithm, register_algorithm

HOLD = Path(__file__).parent / "hold"


def advantages(inputs):
    return np.repeat(inputs.rewards - inputs.rewards.mean(), np.diff(inputs.offsets)) * inputs.action_mask, None


def policy_loss(inputs):
    if os.environ.get("RANK") == "1":
        while (HOLD / "python").exists():
            time.sleep(0.02)
        if (HOLD / "lock").exists():
            hold_the_lock()
    total = -(inputs.logprobs * inputs.advantages).where(inputs.action_mask, 0).sum()
    return total / inputs.denominator, {"policy_loss": total.detach()}


def hold_the_lock():
    # PyDLL keeps the interpreter's lock; the call returns when somebody opens the other end of the pipe.
    libc = ctypes.PyDLL(None)
    libc.close(libc.open(bytes(HOLD / "lock"), os.O_RDONLY))


register_algorithm(Algorithm("held", advantages, policy_loss=policy_loss))
"""

ENGINE = """
import time
from pathlib import Path

def change(module):
    step = module.VllmEngine.step
    def endless_step(engine):
        while (Path({hold!r}) / "engine").exists():
            time.sleep(0.02)
        return step(engine)
    module.VllmEngine.step = endless_step
"""


class Holds:
    """The directory of the files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir()

    def hold(self, place: str) -> None:
        """From now on, whoever comes to `place` stays there."""
        if place == "lock":
            os.mkfifo(self._path / place)
        else:
            (self._path / place).touch()

    def let_go(self, place: str) -> None:
        """Let them go on."""
        if place == "lock":
            other_end = os.open(self._path / place, os.O_WRONLY)
            (self._path / place).unlink()
            os.close(other_end)
        else:
            (self._path / place).unlink()
