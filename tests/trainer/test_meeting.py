"""Ranks of a role that meet at a store that a stranger changes: they end in seconds, and say what may have happened."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore
from waiting import HANG_S, scaled, until

from slurm_rlhf.cluster.processes import STORE_FD
from slurm_rlhf.ranks.torchrun import BoundRendezvous

pytestmark = [pytest.mark.slow]

MEET_S = float(round(scaled(10.0)))  # the libraries may take a part of it
COLLECTIVE_S = 6 * MEET_S
RANK = """
import sys
from slurm_rlhf.errors import RunError
from slurm_rlhf.trainer.distributed import join_world
import torch, torch.distributed as dist
input()  # all libraries are there
try:
    world = join_world({collective}, {meet})
except RunError as error:
    print(error)
    sys.exit(3)
total = torch.ones(1)
dist.all_reduce(total)
print(int(total), dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout)
"""


class Role:
    """Two ranks with a store."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stated = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": "2"}
        stated |= {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK.format(meet=MEET_S, collective=COLLECTIVE_S)],
                env={**os.environ, **stated, "RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def go(self, rank: int) -> None:
        stdin = self.ranks[rank].stdin
        stdin.write("\n")
        stdin.flush()

    def ends(self) -> list[tuple[int, str]]:
        """(exit code, what it said) of each."""
        return [(rank.wait(HANG_S), rank.stdout.read() if rank.stdout else "") for rank in self.ranks]


@pytest.fixture
def role() -> Iterator[Role]:
    made = Role()
    yield made
    for rank in made.ranks:
        rank.kill()
        rank.wait()


@contextmanager
def stranger(port: int, deed: Callable[[TCPStore], None]) -> Iterator[None]:
    """Somebody who speaks the store's protocol does `deed` again and again."""
    over = threading.Event()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=HANG_S))

    def act() -> None:
        while not over.wait(0.001):
            deed(store)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_stranger_who_deletes_what_ranks_say_ends_them_in_seconds_with_a_reason(role: Role) -> None:
    role.go(0)
    foreign = TCPStore("127.0.0.1", role.store.port, is_master=False, wait_for_workers=False)
    while not (keys := [key for key in foreign.list_keys() if "default_pg" in key]):
        time.sleep(0.05)
    for key in keys:
        foreign.delete_key(key)
    role.go(1)
    # The first that ends does it for the run.
    until(lambda: any(rank.poll() is not None for rank in role.ranks), "the end of a rank")
    first = next(rank for rank in role.ranks if rank.poll() is not None)
    said = first.stdout.read() if first.stdout else ""
    assert first.returncode == 3
    assert said.startswith(f"the ranks of this role did not meet within {MEET_S:g} s (timeout.connect)")
    assert f"the store at 127.0.0.1:{role.store.port}; or a stranger has changed the store" in said


def test_a_stranger_who_knows_no_keys_changes_nothing_and_collectives_have_their_own_time(role: Role) -> None:
    def disturb(store: TCPStore) -> None:
        for key in ("init/", "slurm_rlhf/joined", "default_pg/0//cpu//0/rank_0", "rank_0"):
            PrefixStore("", store).delete_key(key)
            store.add(key, 7)

    with stranger(role.store.port, disturb):
        role.go(0)
        role.go(1)
        ends = role.ends()
    assert ends == [(0, f"2 {timedelta(seconds=COLLECTIVE_S)}\n")] * 2


def test_torchruns_of_several_nodes_meet_where_the_agent_of_the_first_has_bound_a_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    monkeypatch.setenv(STORE_FD, str(listener.detach()))
    first, second = (BoundRendezvous("127.0.0.1", port, "run", node, 2) for node in range(2))
    stores: list[Any] = []
    other = threading.Thread(target=lambda: stores.append(second.next_rendezvous()))
    other.start()
    mine = first.next_rendezvous()
    other.join(HANG_S)
    mine.store.set("word", "heard")
    assert stores[0].store.get("word") == b"heard"
    assert {found.bootstrap_store_info.master_port for found in (mine, stores[0])} == {port}
