"""Workers on other nodes: pools ask what the nodes' agents have, and go on without a node that is lost."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, scaled, until
from worker_pools import GO_WRONG, pids_of

from slurm_rlhf.cluster.processes import running
from slurm_rlhf.errors import RoleDied, WorkerError
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.distant import DistantNode, HostedWorkers
from slurm_rlhf.workers.pool import WORKER, Code, WorkerPool, stacks_of_workers

HERE = Path(__file__).parent
SHORT_S = scaled(0.3)


class Node(DistantNode):
    """Has workers as an agent has them, without the network between."""

    def __init__(self, name: str) -> None:
        self.name, self.hosted, self.stated = name, HostedWorkers(), list[str]()
        self.gone, self.silent_s = "", 0.0
        self.threads = ThreadPoolExecutor(16)

    def ask(self, method: str, key: str, arguments: str, limit_s: float) -> Future[str]:
        if self.gone:
            raise RoleDied(self.gone)
        if self.silent_s:
            return Future()
        return self.threads.submit(getattr(self.hosted, method), key, *json.loads(arguments))

    def absence(self, silence_s: float = math.inf) -> str:
        return self.gone or ("not heard from" if self.silent_s >= silence_s else "")

    def lose(self, why: str) -> None:
        self.stated.append(why)


Pools = Callable[..., tuple[WorkerPool, list[Node]]]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pools]:
    """Make pools that serve `served.Served` on nodes, and end them with the test."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    made: list[tuple[WorkerPool, list[Node]]] = []

    def make(count: int = 1, nodes: int = 1, memory_mb: int = 0, **arguments: Any) -> tuple[WorkerPool, list[Node]]:
        hosts = [Node(f"n{number}") for number in range(1, nodes + 1)]
        log = tmp_path / "reward.log"
        made.append((WorkerPool(Code("served", "Served", arguments), count, memory_mb, HANG_S, log, hosts), hosts))
        return made[-1]

    yield make
    for pool, nodes in made:
        pool.close()
        for node in nodes:
            node.hosted.close()
            node.threads.shutdown()


def test_each_node_has_as_many_workers_whose_calls_are_answered(pools: Pools, tmp_path: Path) -> None:
    pool, _ = pools(2, nodes=2)
    pool.ready()
    assert (pool.count, pids_of(pool)) == (4, [])
    big = 10**30
    calls = [pool.submit("double", [number, big, "\ud800"], timeout_s=HANG_S) for number in range(50)]
    assert [call.result(HANG_S)[:2] for call in calls] == [[2 * number, 2 * big] for number in range(50)]
    assert len({pool.lease().worker for _ in range(4)}) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"reward.n1.log", "reward.n2.log"}


@pytest.mark.parametrize(("method", "arguments", "kind", "text", "ends"), GO_WRONG)
def test_a_call_that_goes_wrong_is_reported_as_here(
    pools: Pools, method: str, arguments: tuple[Any, ...], kind: str, text: str, ends: bool
) -> None:
    pool, _ = pools(memory_mb=400)
    lease = pool.lease()
    (before, *_) = lease.submit("keep", 1, timeout_s=HANG_S).result(HANG_S)
    with pytest.raises(WorkerError, match=text) as failed:
        pool.submit(method, *arguments, timeout_s=SHORT_S if method == "hang" else HANG_S).result(HANG_S)
    assert failed.value.kind == kind
    assert running(before) is not ends
    after = lease.submit("keep", 2, timeout_s=HANG_S)
    if ends:
        with pytest.raises(WorkerError, match="the process in which it lived has ended"):
            after.result(HANG_S)
    else:
        assert after.result(HANG_S) == [before, 1, 2]
    assert pool.submit("double", [1], timeout_s=HANG_S).result(HANG_S) == [2]


def test_a_worker_there_that_does_a_call_says_where_it_is(pools: Pools, tmp_path: Path) -> None:
    pool, _ = pools(2)
    pool.ready()
    assert stacks_of_workers() == []
    call = pool.submit("wait", str(tmp_path / "go"), timeout_s=HANG_S)
    where = {(WORKER, "wait")}  # here its own pool tells it, too
    until(lambda: {(one.name, one.frames[0].function) for one in stacks_of_workers()} == where, "its stack")
    (tmp_path / "go").touch()
    assert call.result(HANG_S) is True
    assert stacks_of_workers() == []


def test_code_that_does_not_load_is_said_at_once_and_tried_again(pools: Pools) -> None:
    pool, _ = pools(fails="no such model")
    for _ in range(2):
        with pytest.raises(WorkerError, match="ValueError: no such model"):
            pool.ready()
        with pytest.raises(WorkerError, match="ValueError: no such model"):
            pool.submit("double", [1], timeout_s=HANG_S).result(HANG_S)


def test_a_lost_node_fails_what_it_did_and_the_others_do_the_rest(pools: Pools, tmp_path: Path) -> None:
    pool, nodes = pools(nodes=2)
    pool.ready()
    leases = [pool.lease(), pool.lease()]
    held = [lease.submit("wait", str(tmp_path / "go"), timeout_s=HANG_S) for lease in leases]
    until(lambda: all(call.running() for call in held), "both calls")
    queued = [pool.submit("double", [number], timeout_s=HANG_S) for number in range(4)]
    nodes[0].gone = "cable cut"
    with pytest.raises(WorkerError, match="n1 and its workers are lost: cable cut") as failed:
        held[0].result(HANG_S)
    assert failed.value.kind == "gone"
    (tmp_path / "go").touch()
    assert held[1].result(HANG_S) is True
    assert [call.result(HANG_S) for call in queued] == [[0], [2], [4], [6]]
    assert [node.stated for node in nodes] == [["cable cut"], []]
    with pytest.raises(WorkerError, match="the process in which it lived has ended"):
        leases[0].submit("double", [1], timeout_s=HANG_S).result(HANG_S)
    assert {pool.lease().worker for _ in range(3)} == {leases[1].worker}  # which has more leases by then

    nodes[1].gone = "power cut"
    with pytest.raises(WorkerError, match="power cut"):
        leases[1].submit("double", [1], timeout_s=HANG_S).result(HANG_S)
    last = pool.submit("double", [1], timeout_s=HANG_S)
    with pytest.raises(WorkerError, match="are lost") as failed:
        last.result(HANG_S)
    assert failed.value.kind == "ended"


@pytest.mark.slow
def test_a_node_that_is_silent_past_a_calls_deadline_is_lost(pools: Pools) -> None:
    pool, (node, other) = pools(nodes=2)
    pool.ready()
    leases = {lease.worker.name: lease for lease in (pool.lease(), pool.lease())}
    node.silent_s = timeouts.WORKER_SILENT_S
    patient = leases["worker 0"].submit("double", [1], timeout_s=HANG_S)
    pool.submit("double", [1], timeout_s=SHORT_S).result(HANG_S)  # by the other one
    time.sleep(2 * timeouts.WORKER_LOOK_S)
    assert (patient.done(), node.stated) == (False, [])
    node.silent_s = HANG_S
    with pytest.raises(WorkerError, match="n1 and its workers are lost: not heard from") as failed:
        patient.result(HANG_S)
    assert failed.value.kind == "gone"
    other.silent_s = timeouts.WORKER_SILENT_S
    with pytest.raises(WorkerError, match="n2 and its workers are lost"):
        pool.submit("double", [1], timeout_s=SHORT_S).result(HANG_S)
    with pytest.raises(WorkerError, match=r"no node with workers is left: n.* Start the run again, on other nodes"):
        pool.submit("double", [1], timeout_s=HANG_S).result(HANG_S)


@pytest.mark.slow
def test_a_pool_that_is_closed_ends_its_workers_there_in_the_middle_of_a_call(pools: Pools, tmp_path: Path) -> None:
    pool, nodes = pools(2)
    pids = [pool.lease().submit("keep", 1, timeout_s=HANG_S).result(HANG_S)[0] for _ in range(2)]
    call = pool.submit("wait", str(tmp_path / "never"), timeout_s=1000)
    until(call.running)
    pool.close()
    with pytest.raises(WorkerError, match="closed"):
        call.result(0)
    until(lambda: not any(map(running, pids)), "end of the workers")
    assert nodes[0].stated == []


def test_episodes_of_a_lost_node_begin_anew(pools: Pools) -> None:
    pool, nodes = pools(nodes=2)

    async def play() -> None:
        first = pool.lease()
        (_, *kept) = await asyncio.wrap_future(first.submit("keep", 1, timeout_s=HANG_S))
        next(node for node in nodes if node is first.worker._node).gone = "cut"  # type: ignore[attr-defined]
        for _ in range(2):
            with pytest.raises(WorkerError) as failed:
                await asyncio.wrap_future(first.submit("keep", 2, timeout_s=HANG_S))
            assert failed.value.kind == "gone"
        assert kept == [1]
        assert (await asyncio.wrap_future(pool.lease().submit("keep", 3, timeout_s=HANG_S)))[1:] == [3]

    asyncio.run(play())
