"""A role's handle: typed calls with the deadline of their declaration, the first failure is raised."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pytest
from waiting import HANG_S, scaled

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import CallTimeout, RemoteError, RewardError, RoleDied, WireError
from slurm_rlhf.records import Record
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.codec import call
from slurm_rlhf.wire.handles import ControlServer, RoleHandle, gather


class Job(Record):
    after: float = 0.0
    fail: str = ""
    answer: Any = None


class Done(Record):
    rank: int
    after: float


FORWARD_S = round(scaled(1.0))


class TeamCalls(Protocol):
    @call(deadline="train_step")
    def work(self, job: Job) -> Done: ...

    @call(deadline="forward")
    def look(self, job: Job) -> Done: ...

    @call(deadline="forward")
    def idle(self) -> str: ...


def serve(client: ControlClient, rank: int) -> None:
    with suppress(RoleDied):
        while request := client.receive():
            threading.Thread(target=answer, args=(request, rank), daemon=True).start()


def answer(request, rank: int) -> None:  # type: ignore[no-untyped-def]
    args = request.argument()
    if request.method == "idle":
        request.reply(f"{rank} {args}")
        return
    time.sleep(args["after"])
    match args["fail"]:
        case "":
            request.reply(args["answer"] or Done(rank, args["after"]))
        case "user":
            request.fail(RewardError("reward.py: NaN"))
        case reason:
            request.fail(ValueError(reason))


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[RoleHandle[TeamCalls]]:
    keys = RunKeys.create(tmp_path / "keys.json")
    with ThreadPoolExecutor() as pool, ControlServer(keys) as server:
        clients = [ControlClient(server.endpoint(), keys, "actor", rank, 3) for rank in range(3)]
        for rank, client in enumerate(clients):
            pool.submit(serve, client, rank)
        server.wait_for("actor", 3, HANG_S)
        yield RoleHandle(server, "actor", 3, Timeout(forward=FORWARD_S, train_step=HANG_S))
    for client in clients:
        client.close()


def test_records_go_to_one_rank_to_all_and_to_each(handle: RoleHandle[TeamCalls]) -> None:
    assert handle.call(1, TeamCalls.work, Job()).result(HANG_S) == Done(1, 0.0)
    assert handle.call(2, TeamCalls.idle).result(HANG_S) == "2 None"
    assert handle.call_all(TeamCalls.work, Job()) == [Done(rank, 0.0) for rank in range(3)]
    own = [Job(rank / 100) for rank in range(3)]
    assert gather(handle.start_each(TeamCalls.work, own)) == [Done(rank, rank / 100) for rank in range(3)]
    with pytest.raises(ValueError, match="shorter"):
        handle.start_each(TeamCalls.work, own[:2])


def test_an_answer_of_another_type_is_refused(handle: RoleHandle[TeamCalls]) -> None:
    answer = {"rank": 1, "after": 1.0, "more": 2}
    with pytest.raises(WireError, match=r"the reply of actor rank 0 .* to work is broken: .* unknown field `more`"):
        handle.call(0, TeamCalls.work, Job(answer=answer)).result(HANG_S)


def test_the_first_failure_is_raised_at_once(handle: RoleHandle[TeamCalls]) -> None:
    slow, failing = Job(after=scaled(3.0)), Job(after=0.1, fail="boom")
    futures = handle.start_each(TeamCalls.work, [slow, slow, failing])
    with pytest.raises(RemoteError, match=r"work failed on actor rank 2 .*ValueError: boom"):
        gather(futures)
    assert [future.done() for future in futures] == [False, False, True]


def test_a_failure_names_the_limit_behind_it(handle: RoleHandle[TeamCalls], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2 << 30, 2 << 30))
    failing = handle.call(0, TeamCalls.work, Job(fail="can't start new thread"))
    with pytest.raises(RemoteError, match=r"new thread \(a process may have 2\.0 GiB of address space here"):
        failing.result(HANG_S)


def test_a_users_error_is_preferred_to_what_followed_from_it(handle: RoleHandle[TeamCalls]) -> None:
    futures = handle.start_each(TeamCalls.work, [Job(fail="connection reset"), Job(fail="user"), Job()])
    for future in futures:
        future.exception(HANG_S)
    with pytest.raises(RemoteError, match=r"^reward\.py: NaN$") as caught:
        gather(futures)
    assert caught.value.exit_code == 2


@pytest.mark.slow
def test_the_deadline_is_the_methods(handle: RoleHandle[TeamCalls]) -> None:
    jobs = [Job(), Job(after=3 * FORWARD_S), Job()]
    with pytest.raises(CallTimeout, match=rf"actor rank 1 .* did not answer look within {FORWARD_S} s"):
        gather(handle.start_each(TeamCalls.look, jobs))
    assert len(gather(handle.start_each(TeamCalls.work, jobs))) == 3
