"""The group that the ranks of a role form."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from programs import completed

from slurm_rlhf.trainer.distributed import barrier

STORE = """
import time
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(3600)
"""
MEET_S = 2.0
JOIN = """
from slurm_rlhf.errors import RunError
from slurm_rlhf.trainer.distributed import join_world

try:
    join_world(1800.0, {meet})
except RunError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_store_that_stands_still_costs_no_more_than_the_time_to_connect() -> None:
    """torch's clients would wait for it for ever."""
    with subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True) as server:
        try:
            port = server.stdout.readline().strip()
            os.kill(server.pid, signal.SIGSTOP)
            variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            environment = {**os.environ, **variables, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            done = completed([sys.executable, "-c", JOIN.format(meet=MEET_S)], check=True, env=environment)
        finally:
            server.kill()
    assert f"did not meet within {MEET_S:g} s (timeout.connect)" in done.stdout
    assert f"the store at 127.0.0.1:{port}" in done.stdout


LATE = """
import os
import torch, torch.distributed as dist
from slurm_rlhf.trainer.distributed import join_world

join_world(60.0, 60.0)
for thread in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
    if thread != os.getpid():
        os.setpriority(os.PRIO_PROCESS, thread, 8)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_process_ends_while_gloo_lets_go_of_its_last_tensor() -> None:
    """Its threads come late: without the mend they abort nearly every such process, with SIGABRT."""
    alone = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = completed([sys.executable, "-c", LATE], env=alone)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.fast
@pytest.mark.parametrize(("gpus", "named"), [(True, [3]), (False, None)])
def test_ranks_wait_for_each_other_on_the_gpu_that_is_theirs(
    monkeypatch: pytest.MonkeyPatch, gpus: bool, named: list[int] | None
) -> None:
    """It is named only where NCCL waits: gloo knows no device."""
    stated: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(dist, "barrier", lambda **how: stated.append(how["device_ids"]))
    monkeypatch.setenv("LOCAL_RANK", "3")
    barrier()
    assert stated == [named]
