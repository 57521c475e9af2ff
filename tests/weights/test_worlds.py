"""Two worlds of two ranks, started apart, with default groups of their own, and a sync group across them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = '''
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from sync_peer import describe, hold
from waiting import HANG_S
from slurm_rlhf.weights.group import join
from slurm_rlhf.weights.rendezvous import Membership
from slurm_rlhf.weights.transfer_plan import make_plan
from slurm_rlhf.weights.ends import Sender
from slurm_rlhf.weights.ends import Receiver
from slurm_rlhf.weights.rendezvous import SyncStore

role, rank, place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{place}/{role}", rank=rank, world_size=2)


def world_works():
    """A sum over this role's ranks, and over nobody else's."""
    ours = torch.tensor([rank + (10 if role == "actor" else 20)])
    dist.all_reduce(ours)
    return dist.get_world_size(), ours.item()


def weights(version):
    torch.manual_seed(version)
    return [(f"p{i}", torch.randn(300, 301)) for i in range(20)]


def sender():
    store = SyncStore.listen("localhost", timeout_s=HANG_S)
    (place / "port.new").write_text(str(store.port))
    (place / "port.new").rename(place / "port")
    group = join(Membership("weights", 0, 3, 1, "localhost", store.port, timeout_s=HANG_S, label="actor 0"))
    sender = Sender(group, make_plan(describe(weights(0)), 1 << 20, group.layout(0)))
    for version in (1, 2):
        sender.push(hold(weights(version)), version)
        print(*world_works())
    group.close()


def receiver():
    while not (place / "port").exists():
        time.sleep(0.05)
    port = int((place / "port").read_text())
    group = join(Membership("weights", 1 + rank, 3, 1, "localhost", port, timeout_s=HANG_S, label=f"rollout {rank}"))
    receiver = Receiver(group, make_plan(describe(weights(0)), 1 << 20, group.layout(0)))
    for version in (1, 2):
        with receiver.update(version) as arriving:
            loaded = dict(arriving)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(version)), version
        print(*world_works())
    group.close()


print(*world_works())
if role == "rollout":
    receiver()
elif rank == 0:
    sender()
else:
    for _ in range(2):
        print(*world_works())
dist.destroy_process_group()
'''


def test_two_worlds_keep_their_own_groups_while_weights_go_across(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, role, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for role in ("actor", "rollout")
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=HANG_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * 4, json.dumps(said, indent=1)
    assert [out.split("\n")[:-1] for out, _ in said] == [["2 21"] * 3, ["2 21"] * 3, ["2 41"] * 3, ["2 41"] * 3]
