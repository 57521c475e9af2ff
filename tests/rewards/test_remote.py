"""Rewards over HTTP: whatever a server does, every response gets its own reward or one line says why not."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sampled_responses import sampled
from waiting import HANG_S, scaled, until
from worker_pools import listening

from slurm_rlhf.config.check import reward_source
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, RewardError, WorkerError
from slurm_rlhf.rewards.pooled import RemoteRewards, RewardServer
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.http import Health, Servers, _seconds, health_of, token_of
from slurm_rlhf.workers.pool import Code, WorkerPool

Answer = Callable[[Any, dict[str, Any]], None]


def say(request: Any, status: int, text: bytes, length: int | None = None, **headers: str) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(text) if length is None else length), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(text)


def good(request: Any, body: dict[str, Any]) -> None:
    rewards = [len(query) - len(prompt) for query, prompt in zip(body["query"], body["prompts"], strict=True)]
    say(request, 200, json.dumps({"rewards": rewards}).encode())


def reset(request: Any, body: dict[str, Any]) -> None:
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    request.connection.close()


def slow(request: Any, body: dict[str, Any]) -> None:
    request.server.leave.wait(HANG_S)


FAULTS: dict[str, Answer] = {
    "reset": reset,
    "500": lambda request, body: say(request, 500, b"broken"),
    "429": lambda request, body: say(request, 429, b"", Retry_After="0.05"),
    "slow": slow,
    "truncated": lambda request, body: say(request, 200, b'{"rewards": [1', 14),
    "cut off": lambda request, body: say(request, 200, b'{"rewards"', 100),
}
"""Faults that pass: the same request is answered when it is sent again."""
WRONG: dict[str, tuple[Answer, str]] = {
    "wrong length": (lambda request, body: say(request, 200, b'{"rewards": [1, 2, 3]}'), "3 rewards for 1 responses"),
    "nan": (lambda request, body: say(request, 200, b'{"rewards": [NaN]}'), "nan (float) at index 0"),
    "text": (lambda request, body: say(request, 200, b'{"rewards": ["good"]}'), "'good' (str) at index 0"),
    "no rewards": (lambda request, body: say(request, 200, b'{"score": [1]}'), "a dict without 'rewards'"),
    "404": (lambda request, body: say(request, 404, b"no such page"), "answered status 404: no such page"),
    "401": (lambda request, body: say(request, 401, b"who are you"), "answered status 401: who are you"),
}


@contextmanager
def served(*faults: Answer, port: int = 0) -> Iterator[Any]:
    """Serve rewards; the first requests get `faults`. `seen` has the bodies."""

    class Request(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.seen.append((body, dict(self.headers)))
                answer = left.pop(0) if left else good
            answer(self, body)

        def do_GET(self) -> None:
            say(self, 200, b"")

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    left, lock = list(faults), threading.Lock()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        seen: list[tuple[dict[str, Any], dict[str, str]]]
        leave: threading.Event

    server = Server(("127.0.0.1", port), Request)
    server.seen, server.leave = [], threading.Event()
    with listening(server):
        try:
            yield server
        finally:
            server.leave.set()


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@contextmanager
def client(
    *servers: str, timeout_s: float = HANG_S, token: str = "", on_error: Any = "fail"
) -> Iterator[tuple[RemoteRewards, list[str]]]:
    config, notes = Config(), list[str]()
    config.reward.on_error = on_error
    config.reward.remote_url, config.reward.token = ",".join(servers), token
    config.timeout.reward = timeout_s
    source = RemoteRewards(config, notes.append)
    try:
        yield source, notes
    finally:
        source.close()


def healths(*servers: str, token: str = "") -> list[Health]:
    config = Config()
    config.reward.remote_url, config.reward.token = ",".join(servers), token
    return health_of(config)


TEXTS = ["x" * n for n in range(40)]


def test_each_server_is_tried_once_before_the_first_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()
    servers = Servers("http://127.0.0.1:1,http://127.0.0.1:2", "", print, at_once=1, silence_s=HANG_S)

    def wait(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 4:
            servers._closed.set()

    monkeypatch.setattr(servers._closed, "wait", wait)
    with pytest.raises(WorkerError, match="were closed"):
        servers.ask({})
    assert [pause > 0 for pause in pauses] == [False, True, True, True]
    servers.close()


def test_the_request_is_openrlhfs_with_all_fields_with() -> None:
    with served() as server, client(url(server)) as (source, _):
        assert source(*sampled(["abc"], label="7"), 5).rewards.tolist() == [3]
        (body, headers) = server.seen[0]
    assert (body["query"], body["prompts"], body["labels"], body["step"]) == (["p0abc"], ["p0"], ["7"], 5)
    assert body["items"][0]["row"] == {"input": "p0"}
    assert "Authorization" not in headers


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_what_passes_is_asked_again_and_every_reward_is_right(fault: str) -> None:
    with served(*[FAULTS[fault]] * 10) as server:
        limit = scaled(1.0) if fault == "slow" else HANG_S
        with client(url(server), timeout_s=limit) as (source, _):
            assert source(*sampled(TEXTS)).rewards.tolist() == list(range(40))
        assert len(server.seen) >= 50


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_one_line_with_the_server(fault: str) -> None:
    answer, stated = WRONG[fault]
    with served(answer) as server, client(url(server)) as (source, _), pytest.raises(RewardError) as failed:
        source(*sampled("a"))
    assert stated in str(failed.value)
    assert url(server) in str(failed.value)
    assert "\n" not in str(failed.value)


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_rlhf.workers.http.LARGEST", 1000)
    with served(lambda request, body: say(request, 200, b" " * 5000)) as server, client(url(server)) as (source, _):
        with pytest.raises(RewardError, match="answered more than"):
            source(*sampled("a"))


def test_null_means_that_the_reward_does_not_apply() -> None:
    with served(lambda request, body: say(request, 200, b'{"rewards": [null]}')) as server:
        with client(url(server)) as (source, _):
            found = source(*sampled("a"))
    assert found.skipped.tolist() == [True]


@pytest.mark.slow
def test_of_two_servers_the_one_that_is_there_answers() -> None:
    with served() as gone:
        pass
    with served() as server, client(url(gone), url(server)) as (source, notes):
        assert source(*sampled(TEXTS)).rewards.tolist() == list(range(40))
        found = [(one.url, bool(one.away)) for one in healths(url(gone), url(server))]
        assert found == [(url(gone), True), (url(server), False)]
    assert notes == []


@pytest.mark.slow
def test_a_server_that_is_down_pauses_and_its_return_goes_on() -> None:
    with served() as gone:
        port = gone.server_address[1]
    with client(f"http://127.0.0.1:{port}") as (source, notes), ThreadPoolExecutor(1) as threads:
        asked = threads.submit(source, *sampled(TEXTS))
        until(lambda: notes)
        assert notes[0].startswith(f"warning: the run waits for a server: http://127.0.0.1:{port}: ConnectError")
        assert not asked.done()
        with served(port=port):
            assert asked.result(HANG_S).rewards.tolist() == list(range(40))
    assert notes[1:] == ["warning: a server answers again: the run goes on"]


@pytest.mark.slow
def test_closing_ends_what_waits() -> None:
    with served() as gone:
        pass
    with client(url(gone)) as (source, notes), ThreadPoolExecutor(1) as threads:
        asked = threads.submit(source, *sampled("a"))
        until(lambda: notes)
        source.close()
        with pytest.raises(RewardError, match="were closed"):
            asked.result(HANG_S)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("late", lambda request, body: say(request, 422, b'{"kind": "late", "error": "slow"}')),
        ("raised", WRONG["nan"][0]),
    ],
)
def test_what_fails_alone_gets_what_on_error_says(kind: str, answer: Answer) -> None:
    def one(request: Any, body: dict[str, Any]) -> None:
        (answer if "bad" in "".join(body["query"]) else good)(request, body)

    prompts, trajectories = sampled(["a", "bad", "ccc"])
    with served(*[one] * 9) as server, client(url(server), on_error="skip") as (source, _):
        found = source([prompts[0]] * 2 + [prompts[2]], trajectories)
        asked = sorted((len(body["query"]), body["timeout_s"] / HANG_S) for body, _ in server.seen)
    assert found.rewards.tolist() == [1, 0, 3]
    assert found.skipped.tolist() == [False, True, False]
    assert [why.partition(":")[0] for why in found.failed.tolist()] == ["", kind, ""]
    assert asked == [(1, 0.45), (1, 0.45), (1, 0.9), (2, 0.45)]


@pytest.mark.parametrize("status", [507, 529])
def test_a_server_that_is_at_fault_is_not_asked_before_the_time_that_it_names(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()
    later = formatdate(time.time() + 3, usegmt=True)
    with served(*[lambda request, body: say(request, status, b"", Retry_After=later)] * 2) as server:
        with client(url(server)) as (source, _):
            monkeypatch.setattr(source.servers, "_pause", pauses.append)
            assert source(*sampled(["abc"])).rewards.tolist() == [3]
            monkeypatch.setattr(timeouts, "SERVER_RETRY_S", 0.01)
            source.servers.waits = lambda: pauses.append(2)
            Servers._pause(source.servers, 0.025)  # says twice that it waits
    assert all(1 < pause <= 3 for pause in pauses)
    assert len(pauses) == 4
    assert [_seconds(header) for header in ("120", "0.5", "-1", "", "soon", "nan")] == [120, 0.5, 0, 0, 0, 0]


BODY = "def reward_func(responses, labels):\n    return [int(r) * int(label) for r, label in zip(responses, labels)]\n"


WAITS = """
import pathlib, time

def reward_func(queries, prompts, labels):
    (pathlib.Path("{path}") / queries[0]).touch()
    while not pathlib.Path("{path}/go on").exists():
        time.sleep(0.01)
    return [1]
"""


@contextmanager
def own_server(tmp_path: Path, token: str = "", body: str = BODY) -> Iterator[RewardServer]:
    (tmp_path / "reward.py").write_text(body)
    given = {"source": str(tmp_path / "reward.py"), "function": "", "plugins": []}
    pool = WorkerPool(Code("slurm_rlhf.rewards.function", "served", given), 1, 0, HANG_S, tmp_path / "log")
    server = RewardServer(("127.0.0.1", 0), pool, HANG_S, str(tmp_path / "reward.py"), token)
    with listening(server, pool):
        yield server


def test_our_server_answers_our_client_and_openrlhfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_SECRET", "s3cret")
    import httpx

    with own_server(tmp_path, "s3cret") as server:
        with client(url(server), token="env:REWARD_SECRET") as (source, _):
            assert source(*sampled("123", label="7")).rewards.tolist() == [7, 14, 21]
            (health,) = healths(url(server), token="env:REWARD_SECRET")
            assert (health.serves, health.away) == (str(tmp_path / "reward.py"), "")
            assert [one.away for one in healths(url(server))] == ["status 401"]
            said = r"http://127.0.0.1:\d+: .*reward.py:2: reward_func raised ValueError"
            with pytest.raises(RewardError, match=said):
                source(*sampled("x"))
        with client(url(server)) as (source, _), pytest.raises(RewardError, match="status 401"):
            source(*sampled("1", label="7"))
        body = {"query": ["p5"], "prompts": ["p"], "labels": ["2"]}
        headers = {"Authorization": "Bearer s3cret"}
        answered = httpx.post(url(server) + "/get_reward", json=body, headers=headers, timeout=HANG_S)
        assert answered.json() == {"rewards": [10]}
        endless = '{"query": ["a"], "prompts": ["a"], "step": Infinity}'
        for wrong in ("[]", "{", '{"query": 1}', '{"items": [1]}', '{"items": [{}]}', endless, "[" * 100_000):
            assert httpx.post(url(server), content=wrong, headers=headers, timeout=HANG_S).status_code == 400


def test_clients_that_break_off_leave_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with own_server(tmp_path) as server:
        handle, handled = server.handle_error, list[object]()
        monkeypatch.setattr(server, "handle_error", lambda *about: handled.append(handle(*about)))
        with socket.create_connection(("127.0.0.1", server.server_port)) as gone:
            gone.sendall(b"POST / HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        until(lambda: handled, "its end")
        with socket.create_connection(("127.0.0.1", server.server_port)) as odd:
            odd.sendall(b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n")
            assert odd.recv(100).startswith(b"HTTP/1.1 413")
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_call_whose_client_has_gone_is_not_begun_and_one_that_is_late_is_reported(tmp_path: Path) -> None:
    import httpx

    body = {"query": ["a"], "prompts": [""]}
    with own_server(tmp_path, body=WAITS.format(path=tmp_path)) as server, ThreadPoolExecutor(1) as threads:
        first = threads.submit(httpx.post, url(server), json=body | {"query": ["first"]}, timeout=HANG_S)
        until((tmp_path / "first").exists, "the first call")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url(server), json=body | {"query": ["left"]}, timeout=0.1)
        until(lambda: any(call.answer.cancelled() for call in server.pool.calls), "the end of the call")
        (tmp_path / "go on").touch()
        assert first.result(HANG_S).json() == {"rewards": [1]}
        (tmp_path / "go on").unlink()
        late = httpx.post(url(server), json=body | {"timeout_s": 0.2}, timeout=HANG_S)
        assert (late.status_code, late.json()["kind"]) == (422, "late")
        assert not (tmp_path / "left").exists()


def test_tokens_come_from_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_SECRET", " a ")
    (tmp_path / "token").write_text("b\n")
    assert [token_of(one, "k") for one in ("env:REWARD_SECRET", str(tmp_path / "token"), "")] == ["a", "b", ""]
    with pytest.raises(ConfigError, match=r"reward\.token = env:NOT_THERE: the variable NOT_THERE is not set"):
        token_of("env:NOT_THERE", "reward.token")
    with pytest.raises(ConfigError, match=r"reward\.token: .*absent cannot be read"):
        token_of(str(tmp_path / "absent"), "reward.token")


@pytest.mark.parametrize("token", ["s3cret", "s3/cret", "s3cret" * 60])
def test_a_secret_in_place_of_its_file_or_in_an_address_is_refused_and_not_shown(token: str) -> None:
    config = Config()
    config.reward.token, config.reward.remote_url = token, "https://a/@b,http://user:s3cret@host"
    problems = [*reward_source(config)]
    with pytest.raises(ConfigError) as failed:
        token_of(token, "reward.token")
    assert len(problems) == 2
    assert "cret" not in f"{problems} {failed.value}".replace("secret", "")
