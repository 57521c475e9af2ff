"""Environments on servers: every episode is played as it is here, whatever a server does meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from env_server import EnvServer
from played_episodes import FAULTS, FAULTY, played
from random_models import tiny_tokenizer
from waiting import HANG_S, scaled, until

from slurm_rlhf.cli.main import main
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.environments.host import EnvironmentServer, code_of
from slurm_rlhf.errors import EpisodeError
from slurm_rlhf.records import LOST, STOP, Trajectory
from slurm_rlhf.sampling import environment
from slurm_rlhf.sampling.environment import Environments
from slurm_rlhf.workers.pool import WorkerPool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(directory)
    return Tokenizer.load(directory)


@contextmanager
def serving(tmp_path: Path, code: str = FAULTY, token: str = "", port: int = 0) -> Iterator[EnvironmentServer]:
    """Serve from this process."""
    file = tmp_path / "game.py"
    file.write_text(code)
    pool = WorkerPool(code_of(str(file)), 3, 0, HANG_S, tmp_path / "log")
    server = EnvironmentServer(("127.0.0.1", port), pool, HANG_S, str(file), token)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        pool.ready()
        yield server
    finally:
        server.shutdown()
        thread.join(HANG_S)
        server.server_close()
        pool.close()


def address(server: EnvironmentServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def made(tokenizer: Tokenizer, *urls: str, token: str = "", deadline: float = HANG_S) -> tuple[Environments, list[str]]:
    config, notes = Config(), list[str]()
    config.env.path, config.env.token, config.data.apply_chat_template = ",".join(urls), token, False
    config.rollout.max_new_tokens, config.data.max_len = 8, 200
    config.timeout.environment = deadline
    return Environments(config, tokenizer, None, notes.append), notes


def play(environments: Environments, faults: list[str]) -> list[Trajectory]:
    try:
        return played(environments, faults)
    finally:
        environments.close()


def whole(found: list[Trajectory]) -> Counter[tuple[str, float, int]]:
    return Counter((one.finish_reason, one.reward, one.turns) for one in found if one.finish_reason != LOST)


def test_each_failure_costs_its_own_episode_over_http_too(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "MOST_TRIES", 1000)
    monkeypatch.setenv("ENV_SECRET", "s3cret")
    faults = [*FAULTS] * 4
    with serving(tmp_path, token="s3cret") as server:
        found = play(made(tokenizer, address(server), token="env:ENV_SECRET")[0], faults)
        until(lambda: not server._played, "the end of all episodes there")
        with pytest.raises(EpisodeError, match=r"status 401: .*the token is missing or another one"):
            made(tokenizer, address(server))
    assert [one.finish_reason == LOST for one in found] == [bool(fault) for fault in faults]
    assert whole(found) == {(STOP, 3.0, 3): faults.count("")}


def test_a_call_that_takes_longer_than_the_silence_of_a_server_is_waited_for_and_one_past_its_deadline_is_lost(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = scaled(0.5)
    monkeypatch.setattr("slurm_rlhf.wire.timeouts.SERVER_SILENT_S", silence)
    monkeypatch.setattr(EnvironmentServer, "beat_s", silence / 20)
    code = FAULTY.replace("self.turns += 1", f"self.turns += 1; time.sleep({silence * 1.5} * (self.turns == 1))")
    with serving(tmp_path, code) as server:
        found = play(made(tokenizer, address(server), deadline=3 * silence)[0], ["hangs", "", ""])
    assert found[0].finish_reason == LOST
    assert whole(found) == {(STOP, 3.0, 3): 2}


WAITS = FAULTY.replace(
    "        if self.turns == 2:\n",
    "        if self.turns == 2 and self.fault == 'held':\n"
    "            open(f'{__file__}.{os.getppid()}.{id(self)}', 'w').close()\n"
    "            while not os.path.exists(__file__ + '.go'):\n                time.sleep(0.02)\n"
    "        if self.turns == 2:\n",
)


def test_episodes_of_a_server_that_is_killed_begin_anew_on_another_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        (tmp_path / "game.py").write_text(WAITS)
        servers = [EnvServer(tmp_path / "game.py") for _ in range(2)]
        for server in servers:
            stack.callback(server.kill)
        gone = servers[0].process.pid

        def kill() -> None:
            until(lambda: [*tmp_path.glob(f"game.py.{gone}.*")], "an episode there")
            os.kill(gone, signal.SIGKILL)
            servers[0].process.wait()
            (tmp_path / "game.py.go").touch()

        thread = threading.Thread(target=kill)
        environments, notes = made(tokenizer, *(server.url for server in servers))
        thread.start()
        found = play(environments, ["held"] * 8)
        thread.join(HANG_S)
    assert whole(found) == {(STOP, 3.0, 3): 8}
    assert notes == []


def test_while_no_server_is_there_episodes_wait(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with serving(tmp_path) as server:
        port = server.server_address[1]
        environments, notes = made(tokenizer, address(server))
    with ExitStack() as stack:

        def again() -> None:
            until(lambda: notes, "a note")
            stack.enter_context(serving(tmp_path, port=port))

        back = threading.Thread(target=again)
        back.start()
        found = play(environments, [""] * 4)
        back.join(HANG_S)
    assert whole(found) == {(STOP, 3.0, 3): 4}
    assert [note.partition(": ")[2].partition(":")[0] for note in notes] == [
        "the run waits for a server",
        "a server answers again",
    ]


def test_an_episode_whose_server_always_dies_is_lost(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Here the server forgets each episode, as one that has started again has."""
    with serving(tmp_path) as server:
        environments, _ = made(tokenizer, address(server))
        (found,) = played(environments, [""], before=server._played.clear)
        environments.close()
    assert (found.finish_reason, environments.lost) == (LOST, 1)


LIGHT = """
import sys

class Light:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"slurm_rlhf", "msgspec", *sys.stdlib_module_names}:
            return next(filter(None, (each.find_spec(name, path, target) for each in finders)), None)

finders, sys.meta_path[:] = sys.meta_path[:], [Light()]
"""


def test_a_server_needs_no_package_but_msgspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(LIGHT)
    (tmp_path / "game.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    server = EnvServer(tmp_path / "game.py:Environment")
    server.kill()
    assert server.url.startswith("http://")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (":add", "game.py:1: the tool game.add cannot be described to the policy: Cannot generate JSON schema"),
        (":ad", "env.path: {file} does not define ad; did you mean add?; it has add"),
    ],
)
def test_what_cannot_be_served_is_one_line_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    (tmp_path / "game.py").write_text("def add(a, b):\n    return a + b\n")
    assert main(["serve-env", f"{tmp_path / 'game.py'}{name}", "--port=0", "--workers=1"]) == 2
    stated = capsys.readouterr().err
    assert said.format(file=tmp_path / "game.py") in stated
    assert stated.count("\n") == 1
