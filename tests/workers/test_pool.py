"""The pool of workers: whatever user code does, its call ends by its deadline and the next one finds a worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import HANG_S, scaled, until
from worker_pools import GO_WRONG, pids_of

from slurm_rlhf.cluster.processes import KEYS, running
from slurm_rlhf.errors import WorkerError
from slurm_rlhf.observe.stacks import Frame
from slurm_rlhf.polling import UNDER_WAY
from slurm_rlhf.workers.pool import WORKER, Code, PoolWorker, WorkerPool, stacks_of_workers

HERE = Path(__file__).parent
SERVED = (HERE / "served.py").read_text(encoding="utf-8")
SHORT_S = scaled(0.3)
Pools = Callable[..., WorkerPool]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pools]:
    """Make pools that serve `served.Served`, and end them with the test."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    made: list[WorkerPool] = []

    def make(count: int = 1, memory_mb: int = 0, start_s: float = HANG_S, **arguments: Any) -> WorkerPool:
        pool = WorkerPool(Code("served", "Served", arguments), count, memory_mb, start_s, tmp_path / "log")
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pids = pids_of(pool)
        pool.close()
        assert [pid for pid in pids if running(pid)] == []


def test_calls_are_answered_in_other_processes(pools: Pools) -> None:
    pool = pools(2)
    pool.ready()
    assert os.getpid() not in pids_of(pool)
    assert len(set(pids_of(pool))) == 2
    calls = [pool.submit("double", [number, 10**30], timeout_s=HANG_S) for number in range(50)]
    assert [call.result(HANG_S) for call in calls] == [[2 * number, 2 * 10**30] for number in range(50)]


def test_a_worker_loads_nothing_heavy_and_gets_no_keys(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS, "secret")
    pool = pools()
    assert pool.submit("heavy", timeout_s=HANG_S).result(HANG_S) == []
    assert pool.submit("secrets", timeout_s=HANG_S).result(HANG_S) == []
    gone: Any = SimpleNamespace(pool=SimpleNamespace(memory_mb=1), _process=SimpleNamespace(pid=0))
    assert not PoolWorker._too_large(gone)


def test_a_worker_that_does_a_call_says_where_it_is_and_goes_on(pools: Pools, tmp_path: Path) -> None:
    pool, file = pools(2), tmp_path / "go on"
    pool.ready()
    assert stacks_of_workers() == []
    call = pool.submit("wait", str(file), timeout_s=HANG_S)
    until(lambda: any(worker.busy for worker in pool._workers), "the call")
    line = next(number for number, text in enumerate(SERVED.splitlines(), 1) if "time.sleep(0.01)" in text)
    asleep = Frame(str(HERE / "served.py"), line, "wait")
    until(lambda: [(s.name, s.frames[0]) for s in stacks_of_workers()] == [(WORKER, asleep)], "its stack")
    file.touch()
    assert call.result(HANG_S) is True
    assert stacks_of_workers() == []


@pytest.mark.parametrize(("method", "arguments", "kind", "text", "replaced"), GO_WRONG)
def test_a_call_that_goes_wrong_is_reported_by_kind(
    pools: Pools, method: str, arguments: tuple[Any, ...], kind: str, text: str, replaced: bool
) -> None:
    pool = pools(memory_mb=400)
    pool.ready()
    (before,) = pids_of(pool)
    limit = HANG_S if method == "grow" else SHORT_S if method == "hang" else HANG_S
    with pytest.raises(WorkerError) as failed:
        pool.submit(method, *arguments, timeout_s=limit).result(HANG_S)
    assert failed.value.kind == kind
    assert text in str(failed.value)
    assert pool.submit("double", [1], timeout_s=HANG_S).result(HANG_S) == [2]
    assert (pids_of(pool) != [before]) is replaced
    assert running(before) is not replaced


@pytest.mark.slow
def test_a_late_call_leaves_its_print_and_its_stack_in_the_log(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        pools().submit("hang", timeout_s=SHORT_S).result(HANG_S)
    log = (tmp_path / "log").read_text()
    assert "about to hang" in log
    assert 'served.py", line' in log


def test_what_a_call_prints_is_in_the_log_when_it_is_answered_or_soon_after(pools: Pools, tmp_path: Path) -> None:
    pool = pools()
    assert pool.submit("say", "heard", timeout_s=HANG_S).result(HANG_S) is None
    until(lambda: "heard" in (tmp_path / "log").read_text())


@pytest.mark.slow
def test_bad_calls_hold_up_no_others(pools: Pools, tmp_path: Path) -> None:
    pool = pools(2)
    bad = [pool.submit(name, timeout_s=SHORT_S) for name in ("hang", "crash") * 5]
    good = [pool.submit("double", [number], timeout_s=HANG_S) for number in range(100)]
    wait([*bad, *good], HANG_S)
    assert [call.result(0) for call in good] == [[2 * number] for number in range(100)]
    kinds = [error.kind for call in bad if isinstance(error := call.exception(0), WorkerError)]
    assert sorted(kinds) == ["ended"] * 5 + ["late"] * 5


def test_what_a_worker_started_ends_with_it(pools: Pools) -> None:
    pool = pools()
    child = pool.submit("spawn", timeout_s=HANG_S).result(HANG_S)
    with pytest.raises(WorkerError):
        pool.submit("crash", timeout_s=HANG_S).result(HANG_S)
    until(lambda: not running(child))


def test_a_lease_keeps_its_worker_until_that_ends(pools: Pools) -> None:
    pool = pools(2)
    first, second = pool.lease(), pool.lease()

    async def play() -> None:
        one = [await asyncio.wrap_future(first.submit("keep", number, timeout_s=HANG_S)) for number in range(3)]
        other = await asyncio.wrap_future(second.submit("keep", 9, timeout_s=HANG_S))
        assert one[-1][1:] == [0, 1, 2]
        assert other[1:] == [9]
        assert other[0] != one[0][0]
        with pytest.raises(WorkerError, match="SIGSEGV"):
            await asyncio.wrap_future(first.submit("crash", timeout_s=HANG_S))
        with pytest.raises(WorkerError, match="the process in which it lived has ended"):
            await asyncio.wrap_future(first.submit("keep", 4, timeout_s=HANG_S))
        assert (await asyncio.wrap_future(second.submit("keep", 8, timeout_s=HANG_S)))[1:] == [9, 8]
        first.end()
        assert (await asyncio.wrap_future(pool.lease().submit("keep", 5, timeout_s=HANG_S)))[1:] == [5]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("arguments", "start_s", "text"),
    [
        ({"fails": "no such model"}, HANG_S, "ValueError: no such model"),
        pytest.param({"slow_s": 1000}, SHORT_S, "load its code", marks=pytest.mark.slow),
    ],
)
def test_code_that_does_not_load_is_said_at_once(
    pools: Pools, arguments: dict[str, Any], start_s: float, text: str
) -> None:
    pool = pools(2, start_s=start_s, **arguments)
    with pytest.raises(WorkerError, match=text):
        pool.ready()
    with pytest.raises(WorkerError, match=text):
        pool.submit("double", [1], timeout_s=HANG_S).result(HANG_S)


def test_a_pool_that_is_closed_ends_calls_and_takes_none(pools: Pools, tmp_path: Path) -> None:
    pool = pools()
    pool.ready()
    began = pool.submit("wait", str(tmp_path / "never"), timeout_s=HANG_S)
    until(began.running)
    waiting = pool.submit("double", [1], timeout_s=HANG_S)
    pool.close()
    with pytest.raises(WorkerError):
        began.result(HANG_S)
    assert waiting.cancelled()
    with pytest.raises(WorkerError, match="closed"):
        pool.submit("double", [1], timeout_s=HANG_S)


OWNER = """
import os, time
from pathlib import Path
from slurm_rlhf.workers.pool import Code, WorkerPool
silent = Path(os.devnull)  # a text of a worker could stand between the numbers
pool = WorkerPool(Code("served", "Served", {}), 3, 0, 60, silent)
pool.ready()
pool.submit("hang", timeout_s=1000)
print(*(worker.process.pid for worker in pool._workers), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_conductor(pools: Pools, number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], env={**os.environ, "PYTHONPATH": str(HERE)}, stdout=subprocess.PIPE, text=True
    )
    pids: list[int] = []
    try:
        while len(pids) < 3:
            words = owner.stdout.readline().split()
            pids = [int(word) for word in words if word.isdigit()]
        assert all(running(pid) for pid in pids)
    finally:
        owner.send_signal(number)
        owner.wait(HANG_S)
        owner.stdout.close()
    until(lambda: not any(running(pid) for pid in pids))


def test_a_call_is_under_way_until_it_has_ended(pools: Pools, tmp_path: Path) -> None:
    before, call = UNDER_WAY.ended, pools().submit("wait", str(tmp_path / "go on"), timeout_s=7 * HANG_S)
    until(lambda: UNDER_WAY.longest_s() == 7 * HANG_S, "the call")
    assert UNDER_WAY.ended == before
    (tmp_path / "go on").touch()
    call.result(HANG_S)
    assert (UNDER_WAY.ended, UNDER_WAY.longest_s()) == (before + 1, 0.0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.slow
def test_the_child_of_a_fork_that_comes_back_answers_no_call(pools: Pools, fails: bool) -> None:
    pool = pools()
    assert pool.submit("fork", fails, timeout_s=HANG_S).result(HANG_S) == "forked"
    time.sleep(SHORT_S)
    for number in range(3):
        assert pool.submit("double", [number], timeout_s=HANG_S).result(HANG_S) == [2 * number]
