"""A rank imports its libraries before anybody listens for it: an import that holds the interpreter costs no rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from control_peer import ask
from waiting import HANG_S, scaled

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.messages import Peer

pytestmark = pytest.mark.slow

LIMIT = scaled(1.0)
"""Seconds of silence after which a rank is lost."""
HELD = 2.5 * LIMIT
"""Seconds for which an import holds the interpreter's lock."""

# Each rank's interpreter runs this at its start: `dlopen` of a large library, as slow storage makes it.
SLOW = f"""
import ctypes, importlib.machinery, json, os, sys, time
SLOW = set(json.loads(os.environ["SLOW_IMPORTS"]))
class Slow:
    def find_spec(self, name, path=None, target=None):
        # vLLM has a library for each kind of CPU: vllm._C, vllm._C_AVX2, ...
        if (name := name.partition("_AVX")[0]) in SLOW:
            SLOW.discard(name)
            ctypes.PyDLL(None).usleep({int(HELD * 1e6)})  # PyDLL keeps the lock, as an extension's import does
            with open(os.environ["SLOW_LOG"], "a") as log:
                print(name, file=log)
sys.meta_path.insert(0, Slow())
"""
LIBRARIES = {"actor": ["torch", "deepspeed"], "rollout": ["torch", "vllm._C"]}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    config = Config(run_dir=str(tmp_path / "run"))
    config.timeout.heartbeat, config.timeout.heartbeat_interval = LIMIT, LIMIT / 8
    directory = RunDirectory(Path(config.run_dir))
    directory.logs.mkdir(parents=True)
    directory.config.write_text(dump_toml(config))
    return directory


def start(role: str, directory: RunDirectory, endpoint: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    slow = directory.root.parent / "slow"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{slow}{os.pathsep}{root}",
        "SLOW_IMPORTS": json.dumps(LIBRARIES[role]),
        "SLOW_LOG": str(slow / role),
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-m", "slurm_rlhf.ranks.rank_process", f"--role={role}", f"--run_dir={directory.root}"]
    return subprocess.Popen(
        [*command, f"--endpoint={endpoint}", "--first_rank=0", "--world=1"], env=environment, start_new_session=True
    )


def test_a_slow_import_that_holds_the_interpreter_does_not_lose_the_rank(directory: RunDirectory) -> None:
    lost: list[Any] = []

    def on_lost(peer: Peer) -> None:
        lost.append(str(peer))

    keys = RunKeys.create(directory.keys)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with ControlServer(keys, heartbeat_interval=LIMIT / 8, heartbeat_limit=LIMIT, on_lost=on_lost) as server:
        try:
            for role in LIBRARIES:
                processes[role] = start(role, directory, server.endpoint())
            for role, libraries in LIBRARIES.items():
                server.wait_for(role, 1, HANG_S)
                imported = (directory.root.parent / "slow" / role).read_text().split()
                assert imported == libraries, f"{role} says hello before it has imported its libraries"
            quiet_until = time.monotonic() + 2 * LIMIT
            while time.monotonic() < quiet_until:
                assert not lost
                time.sleep(0.05)
            for role in LIBRARIES:
                assert ask(server, role, 0, "shutdown", timeout_s=HANG_S).result() == "done"
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    assert not lost
