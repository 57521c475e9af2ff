"""The tiny run that is broken: a random model, sums to learn, a reward function and a plugin that `holds` hold up."""

from __future__ import annotations

from pathlib import Path

from holds import Holds
from random_models import make_model
from sums_task import REWARD, TINY, sums, toml
from waiting import scaled

PLUGIN = '''"""Algorithms that can be held up: actor rank 1 in its loss, rank 0 in the export. Clocks, phases."""

import ctypes
import dataclasses
import json
import os
import socket
import time
from pathlib import Path

from slurm_rlhf import register_algorithm
from slurm_rlhf.algorithms.registry import find_algorithm

HOLD = Path(__file__).parent / "hold"
CLOCKS = (HOLD / "clock", HOLD / f"clock.{socket.gethostname()}")
right = time.time


def set_clock():
    for clock in CLOCKS:
        try:
            return right() + float(clock.read_text())
        except (OSError, ValueError):
            continue
    return right()


time.time = set_clock


def policy_loss(inputs):
    from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

    if os.environ.get("RANK") == "0":
        slow_export()
    if os.environ.get("RANK") == "1":
        while (HOLD / "python").exists():
            time.sleep(0.02)
        if (HOLD / "lock").exists():
            hold_the_lock()
        if (HOLD / "actor-raise").exists():
            raise RuntimeError("the campaign's fault")
    return POLICY_LOSSES["ppo"].function(inputs)


def hold_the_lock():
    # PyDLL keeps the interpreter's lock; the call returns when somebody opens the other end of the pipe.
    libc = ctypes.PyDLL(None)
    libc.close(libc.open(bytes(HOLD / "lock"), os.O_RDONLY))


def slow_export():
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained
    if save.__name__ == "wait_and_save":
        return

    def wait_and_save(model, *args, **kwargs):
        while (HOLD / "export").exists():
            time.sleep(0.02)
        return save(model, *args, **kwargs)

    PreTrainedModel.save_pretrained = wait_and_save


def note_phases():
    from slurm_rlhf.run.recording import Recorder

    phase, files = Recorder.phase, []

    def phase_and_note(recorder, name):
        phase(recorder, name)
        if not files:
            place = recorder._directory.root / ".control" / "phase"
            files.append(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
        # One write of one length, so that a reader on this machine sees a whole line.
        line = json.dumps({"phase": name, "step": recorder.step, "since": right()})
        os.pwrite(files[0], line.ljust(128).encode() + b"\\n", 0)

    Recorder.phase = phase_and_note


if "RANK" not in os.environ:
    note_phases()
for name in ("gae", "group_norm"):
    register_algorithm(dataclasses.replace(find_algorithm(name), name=f"held_{name}", policy_loss=policy_loss))
'''
CONFIG = {
    **TINY,
    "actor.num_gpus_per_node": 2,
    "algo.advantage.estimator": "held_gae",
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 2,
    "train.plugins": ["plugin.py"],
    "train.batch_size": 8,
    "train.num_episodes": 1000,
    "train.max_steps": 1000,
    "train.self_check": False,
    "train.threads_per_rank": 1,
    "ckpt.save_steps": 2,
    "ckpt.max_num": 3,
    "logger.report_steps": 0,
    "logger.tensorboard": False,
    "timeout.connect": 60,
    "timeout.heartbeat_interval": 0.5,
    "timeout.heartbeat": scaled(12),
    "timeout.hang": scaled(8),
    "reward.workers": 0,  # the function is held up in the conductor, which the watchdog names
    "timeout.hang_grace": 4,
    "timeout.shutdown": 4,
}
"""Five ranks of four roles. A rank that does not come is missed after a minute, silence after 12 s, a hang
after 8 s on a quick machine, and later on a slow one: less would be taken for a fault that is none."""


def write_workload(path: Path) -> Path:
    """Write model, data and code to `path`, unless they are there; return the file of the configuration."""
    config = path / "run.toml"
    path.mkdir(parents=True, exist_ok=True)
    Holds(config).clear()
    if not (path / "model" / "config.json").exists():
        make_model(path / "model", "qwen2", noisy=False)
    (path / "prompts.jsonl").write_text("".join(sums()), encoding="utf-8")
    (path / "reward.py").write_text(REWARD, encoding="utf-8")
    (path / "plugin.py").write_text(PLUGIN, encoding="utf-8")
    config.write_text(toml(CONFIG), encoding="utf-8")
    return config
