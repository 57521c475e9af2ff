"""Environments that fail in every way, many at once, here and on servers: each costs its own episode."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from env_server import EnvServer
from random_models import saved_tokenizer
from waiting import HANG_S, scaled, until
from worker_pools import listening, pids_of

from slurm_rlhf.cli.main import main
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.environments.host import EnvironmentServer, code_of
from slurm_rlhf.errors import EpisodeError
from slurm_rlhf.records import LOST, STOP, Prompt, Sampling, Trajectory, VersionSpan, digest
from slurm_rlhf.sampling import environment
from slurm_rlhf.sampling.environment import Environments
from slurm_rlhf.workers.pool import WorkerPool

pytestmark = pytest.mark.slow

FAULTY = """
import os, signal, time

class Environment:
    def __init__(self):
        self.turns = 0

    def reset(self, row):
        self.fault = row["fault"]
        if self.fault == "reset":
            raise ValueError("no reset")

    def step(self, messages):
        self.turns += 1
        if self.turns == 2:
            if self.fault == "raises":
                raise ValueError("no step")
            if self.fault == "hangs":
                time.sleep(3600)
            if self.fault == "nothing":
                return None
            if self.fault == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "exits":
                os._exit(3)
        return "1", 1.0, self.turns == 3
"""
IN_MAIN = f"import sys\n\ndef main():\n    _, option, url = sys.argv\n{textwrap.indent(FAULTY, '    ')}"
"""Makes its class in a function that needs arguments, as TRL's scripts."""
FAULTY_EXECUTOR = """
import asyncio
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        if label == "reset":
            raise ValueError("no reset")
        ids, ranges = hf_tokenizer.encode(prompt), []
        for turn in range(3):
            if turn == 2:
                if label == "raises":
                    raise ValueError("no step")
                if label == "hangs":
                    await asyncio.sleep(3600)
                if label == "nothing":
                    return None
            said = (await llm_engine.generate(ids, sampling_params)).outputs[0]
            ranges.append((len(ids), len(ids) + len(said.token_ids)))
            ids = ids + said.token_ids + hf_tokenizer.encode("1") * (turn < 2)
        return {"observation_tokens": ids, "action_ranges": ranges, "reward": 3, "scores": 3, "extra_logs": {}}
"""
"""Fails in the ways of `FAULTY` that leave its process, as an agent file of OpenRLHF."""
FAULTS = ("", "", "", "", "", "", "reset", "raises", "nothing", "kills", "exits")


def played(
    environments: Environments, faults: list[str], before: Callable[[], None] = lambda: None
) -> list[Trajectory]:
    """Play an episode for each fault, all at once; call `before` before each turn."""
    ids = np.array(environments.tokenizer.encode("2+2="), dtype=np.int32)
    prompts = [Prompt(i, "2+2=", ids, f, {"input": "2+2=", "fault": f}, "input") for i, f in enumerate(faults)]

    async def all_of_them() -> list[Trajectory]:
        return list(await asyncio.gather(*(_episode(environments, prompt, before) for prompt in prompts)))

    return asyncio.run(all_of_them())


async def _episode(environments: Environments, prompt: Prompt, before: Callable[[], None]) -> Trajectory:
    ids = np.array(environments.tokenizer.encode("4"), dtype=np.int32)
    floats, mask = np.zeros(1, dtype=np.float32), np.ones(1, dtype=np.bool_)
    playing = environments.begin(prompt, Sampling(max_new_tokens=8), 0)
    try:
        whole = await playing.start()
        while whole is None:
            spans, said = [VersionSpan(0, 1, 0)], environments.tokenizer.decode(ids.tolist())
            answer = Trajectory(prompt.index, 0, ids, ids, floats, mask, STOP, said, spans, digests=[digest(ids)])
            before()
            whole = await playing.take(answer)
        return whole
    finally:
        playing.drop()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved_tokenizer(tmp_path_factory.mktemp("model"))


def game(tmp_path: Path, code: str = FAULTY) -> str:
    """Write an environment's file."""
    (tmp_path / "game.py").write_text(code)
    return str(tmp_path / "game.py")


def made(
    tokenizer: Tokenizer, *paths: str, workers: int = 3, token: str = "", deadline: float = HANG_S
) -> tuple[Environments, list[str]]:
    """Environments of a file or of servers, and what is noted of them."""
    config, notes = Config(), list[str]()
    config.env.path, config.env.token, config.data.apply_chat_template = ",".join(paths), token, False
    config.env.workers = workers
    config.rollout.max_new_tokens, config.data.max_len = 8, 200
    config.timeout.environment = deadline
    return Environments(config, tokenizer, None, notes.append), notes


def play(environments: Environments, faults: list[str]) -> list[Trajectory]:
    """Play to the end; no lease and no process is left of those that are played here."""
    pool = environments.host._pool if environments.host.servers is None else None
    try:
        found = played(environments, faults)
        until(lambda: pool is None or not any(worker.leases for worker in pool._workers), "the last lease's end")
        return found
    finally:
        pids = pids_of(pool) if pool else []
        environments.close()
        assert bool(pids) == bool(pool)
        assert not any(psutil.pid_exists(pid) for pid in pids)


def whole(found: list[Trajectory]) -> Counter[tuple[str, float, int]]:
    return Counter((one.finish_reason, one.reward, one.turns) for one in found if one.finish_reason != LOST)


def test_each_failure_costs_its_own_episode(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Those whose process another one has ended begin anew, here more often than three times."""
    faults = list(FAULTS) * 6
    found = play(made(tokenizer, game(tmp_path))[0], faults)
    assert [one.finish_reason == LOST for one in found] == [bool(fault) for fault in faults]
    assert [one.action_mask.any() for one in found] == [not fault for fault in faults]
    assert whole(found) == {(STOP, 3.0, 3): faults.count("")}
    assert {len(one.response_ids) for one in found if one.finish_reason != LOST} == {5}


def test_one_that_hangs_is_lost_after_its_deadline(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = play(made(tokenizer, game(tmp_path), deadline=scaled(1.0))[0], ["hangs", "", "", "", "", ""])
    assert [one.finish_reason for one in found] == [LOST, *[STOP] * 5]


def test_an_executor_that_fails_costs_its_own_episode(tmp_path: Path, tokenizer: Tokenizer) -> None:
    faults = ["hangs", "", "reset", "", "raises", "", "nothing", ""]
    environments, _ = made(tokenizer, game(tmp_path, FAULTY_EXECUTOR), workers=1, deadline=scaled(3.0))
    found = play(environments, faults)
    assert [one.finish_reason == LOST for one in found] == [bool(fault) for fault in faults]
    assert environments.lost == 4
    for one in found:
        if one.finish_reason != LOST:
            assert (one.reward, one.turns, one.action_mask.tolist()) == (3.0, 3, [True, False, True, False, True])
            assert [each["role"] for each in json.loads(one.dialogue)] == ["assistant", "user"] * 2 + ["assistant"]


def test_an_episode_does_not_begin_anew_for_ever(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(EpisodeError, match=r"\d+ of \d+ episodes are lost"):
        play(made(tokenizer, game(tmp_path))[0], ["kills"] * 40)


# --- servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(tmp_path: Path, code: str = FAULTY, token: str = "", port: int = 0) -> Iterator[EnvironmentServer]:
    """Serve from this process."""
    file = game(tmp_path, code)
    pool = WorkerPool(code_of(file), 3, 0, HANG_S, tmp_path / "log")
    server = EnvironmentServer(("127.0.0.1", port), pool, HANG_S, file, token)
    with listening(server, pool):
        yield server


def address(server: EnvironmentServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


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
        file = game(tmp_path, WAITS)
        servers = [EnvServer(Path(file)) for _ in range(2)]
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
    (tmp_path / "game.py").write_text(IN_MAIN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    server = EnvServer(tmp_path / "game.py:Environment", "--env-url", "http://127.0.0.1:8001")
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
