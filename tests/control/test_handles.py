"""A role's handle: every method has its deadline, the first failure is raised."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_rlhf.config.schema_timeout import Timeout
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.deadlines import DEADLINES, deadline
from slurm_rlhf.control.handles import RoleHandle, gather
from slurm_rlhf.control.keys import RunKeys
from slurm_rlhf.control.server import ControlServer
from slurm_rlhf.errors import CallTimeout, RemoteError, RewardError, RoleDied, RunError

pytestmark = pytest.mark.timeout(30)


def serve(client: ControlClient, rank: int) -> None:
    try:
        while True:
            request = client.receive()
            assert request is not None
            threading.Thread(target=answer, args=(request, rank), daemon=True).start()
    except RoleDied:
        return


def answer(request, rank: int) -> None:  # type: ignore[no-untyped-def]
    time.sleep(request.args.get("after", 0))
    match request.args.get("fail", ""):
        case "":
            request.reply([rank, request.args])
        case "user":
            request.fail(RewardError("reward.py: NaN"))
        case reason:
            request.fail(ValueError(reason))


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[RoleHandle]:
    keys = RunKeys.create(tmp_path / "keys.json")
    with ControlServer(keys) as server:
        clients = [ControlClient(server.endpoint(), keys, "actor", rank, 3) for rank in range(3)]
        threads = [threading.Thread(target=serve, args=pair) for pair in zip(clients, range(3), strict=True)]
        for thread in threads:
            thread.start()
        server.wait_for("actor", 3, 10)
        yield RoleHandle(server, "actor", 3, Timeout(forward=0.4, train_step=20.0))
    for thread in threads:
        thread.join(5)
    for client in clients:
        client.close()


def test_shared_and_own_arguments(handle: RoleHandle) -> None:
    assert handle.call(1, "train_step", a=1).result(5) == [1, {"a": 1}]
    assert handle.call_all("train_step", a=1) == [[rank, {"a": 1}] for rank in range(3)]
    own = [{"b": rank * 10, "a": 2} if rank else {"b": 0} for rank in range(3)]
    assert handle.call_all("train_step", own, a=1) == [[0, {"a": 1, "b": 0}], [1, own[1]], [2, own[2]]]
    with pytest.raises(RunError, match="arguments for 2 ranks; actor has 3"):
        handle.call_all("train_step", [{}, {}])


def test_the_first_failure_is_raised_at_once(handle: RoleHandle) -> None:
    began = time.monotonic()
    slow, failing = {"after": 1.5}, {"fail": "boom", "after": 0.1}
    with pytest.raises(RemoteError, match=r"train_step failed on actor rank 2 .*ValueError: boom"):
        handle.call_all("train_step", [slow, slow, failing])
    assert time.monotonic() - began < 1.0


def test_a_users_error_is_preferred_to_what_followed_from_it(handle: RoleHandle) -> None:
    futures = handle.start_all("train_step", [{"fail": "connection reset"}, {"fail": "user"}, {}])
    for future in futures:
        future.exception(5)
    with pytest.raises(RemoteError, match=r"^reward\.py: NaN$") as caught:
        gather(futures)
    assert caught.value.exit_code == 2


def test_the_deadline_is_the_methods(handle: RoleHandle) -> None:
    late = {"after": 1.0}
    with pytest.raises(CallTimeout, match=r"actor rank 1 .* did not answer logprobs within 0\.4 s"):
        handle.call_all("logprobs", [{}, late, {}])
    assert len(handle.call_all("train_step", [{}, late, {}])) == 3


def test_every_deadline_is_a_timeout_of_the_configuration() -> None:
    names = {field.name for field in dataclasses.fields(Timeout)}
    assert set(DEADLINES.values()) <= names
    assert all(deadline(Timeout(), method) > 0 for method in DEADLINES)
    with pytest.raises(RunError, match=r"'trainstep' has no deadline; methods with one: .*train_step"):
        deadline(Timeout(), "trainstep")
