"""Engines that die and are started again, with ranks that are real processes over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import hang_peer
import pytest
from waiting import HANG_S, until

from slurm_rlhf.cluster.processes import exit_text
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RemoteError, RoleDied
from slurm_rlhf.groups.engine_pool import EnginePool
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.nodes.launcher import Ended
from slurm_rlhf.observe.run_log import EventLog, engines_lost, read_events
from slurm_rlhf.placement.rank_map import NodeShare, RankMap, place
from slurm_rlhf.placement.topology import RoleSize, Topology
from slurm_rlhf.polling import in_thread
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.calls import RankCalls

pytestmark = [pytest.mark.slow]

LIMIT = 3.0
RANK = {0: 0, 1: 2}  # engine -> its leader
TOPOLOGY = Topology.uniform(["n1", "n2"], 4)


class Engines:
    """Stands in for `AgentEngines`: two engines of two ranks each."""

    address = "127.0.0.1"

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.spares: list[str] = []
        self.unfit: dict[str, str] = {}
        self.homes = {0: "n1", 1: "n1"}
        self.places: list[tuple[int, str]] = []  # further starts
        self.of: dict[int, list[subprocess.Popen[bytes]]] = {}
        self.stated: set[int] = set()

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        self.endpoint = next(word for word in arguments if word.startswith("--endpoint=")).partition("=")[2]
        for engine in RANK:
            self._start(engine, self.homes[engine])

    def _start(self, engine: int, node: str) -> None:
        ranks = (RANK[engine], RANK[engine] + 1)
        started = []
        for rank in ranks:
            log = self.directory.role_log("rollout", node, rank)
            words = [self.endpoint, self.directory.keys, "rollout", rank, 4, LIMIT, log, node]
            started.append(hang_peer.started(*words))
        self.of[engine] = started

    def ended(self) -> list[tuple[int, str]]:
        found = []
        for engine, processes in self.of.items():
            codes = [code for process in processes if (code := process.poll()) is not None]
            if codes and engine not in self.stated:
                self.stated.add(engine)
                found.append((engine, f"a rank of engine {engine} {exit_text(codes[0])}"))
        return found

    def end(self, engine: int) -> None:
        self.stated.add(engine)
        for process in self.of[engine]:
            process.kill()

    def gone(self, engine: int) -> bool:
        return all(process.poll() is not None for process in self.of[engine])

    def start_again(self, engine: int, node: str) -> None:
        assert self.gone(engine)
        self.places.append((engine, node))
        self._start(engine, node)
        self.stated.discard(engine)

    def stop(self, done: bool, grace_s: float) -> None:
        for processes in self.of.values():
            for process in processes:
                process.kill()
                process.wait()


class Roles:
    """Implements `Launcher` with engines, and roles of which nobody comes: n2 is dead."""

    address = "127.0.0.1"

    def __init__(self, directory: RunDirectory) -> None:
        self.engines = Engines(directory)
        self.stop = self.engines.stop
        self.agents = self

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        if role == "rollout":
            self.engines.start(role, arguments, environment)

    def unheard(self, seconds: float) -> set[str]:
        return {"n2"}

    def ended(self) -> list[Ended]:
        return []


class Weights:
    """Stands in for `WeightSync`."""

    def connect(self, parameters: object, engines: list[int]) -> None: ...

    def update(self, version: int) -> dict[str, float]:
        return {"version": version}


class Bench:
    def __init__(self, path: Path, most: int, ranks: RankMap | None = None) -> None:
        directory = RunDirectory(path / "run")
        directory.make()
        config = self.config = Config()
        config.timeout.heartbeat_interval, config.timeout.heartbeat, config.timeout.shutdown = 0.2, LIMIT, 1.0
        config.train.max_engine_restarts, config.vllm.tensor_parallel_size = most, 2
        self.launcher = Roles(directory)
        self.ranks = ranks = ranks or place(TOPOLOGY, [RoleSize("rollout", 1, 4, tp=2, engines=2)])
        self.launcher.engines.homes = ranks.engine_nodes
        self.supervisor = Supervisor(config, directory, ranks, self.launcher)  # type: ignore[arg-type]
        self.starting = in_thread(lambda: self.supervisor.start({role: {} for role in ranks.roles}), "start")
        until(lambda: self.supervisor.engines is not None)
        self.engines = self.supervisor.engines
        self.said: list[str] = []
        self._file, self._log = directory.events, EventLog(directory.events)
        self.engines.tell = self._tell
        self.handle = self.supervisor.roles["rollout"]
        self.pool = EnginePool(self.supervisor, self.engines, self.handle, Weights(), True)  # type: ignore[arg-type]
        self.engines.begin(True, self.said.append)

    def _tell(self, text: str, kind: str, engine: int) -> None:
        self._log.append(kind, 1, text, engine)
        self.said.append(text)

    @property
    def lost(self) -> dict[int, str]:
        """The lost engines, as `slurm-rlhf status` shows them."""
        return engines_lost(read_events(self._file))

    @property
    def processes(self) -> dict[int, list[subprocess.Popen[bytes]]]:
        return self.launcher.engines.of

    def begin(self) -> None:
        assert self.pool.wait([]) == [0, 1]
        self.pool.update(1)
        assert self.handle.ready == [0, 1]

    def until_back(self, engine: int, version: int) -> None:
        def back() -> bool:
            self.pool.update(version)
            return engine in self.handle.ready

        until(back)


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, getattr(request, "param", 1))
    try:
        yield made
    finally:
        made.supervisor.stop()


def test_a_killed_rank_costs_its_engine_which_comes_back_whole_and_at_last_is_left_out(bench: Bench) -> None:
    bench.begin()
    first = {process.pid for process in bench.processes[1]}
    os.kill(bench.processes[1][1].pid, signal.SIGKILL)
    until(lambda: bench.handle.ready == [0])
    until(lambda: isinstance(bench.handle.ask(RANK[1], RankCalls.stacks).exception(HANG_S), RoleDied))
    assert bench.supervisor.failure is None
    until(lambda: list(bench.lost) == [1])
    bench.until_back(1, 2)
    assert bench.lost == {}
    assert not first & {process.pid for process in bench.processes[1]}
    assert bench.launcher.engines.places == [(1, "n1")]
    lost, back = bench.said
    assert "engine 1 on n1 is lost: a rank of engine 1 was killed by SIGKILL. 1 of 2 engines go on" in lost
    assert "engine 1 on n1 takes part again from policy version 2 on, " in back
    os.kill(bench.processes[1][0].pid, signal.SIGKILL)
    until(lambda: "left out" in bench.said[-1])
    assert "engine 1 on n1 is left out: it died 2 times (train.max_engine_restarts = 1); 1 of 2 are left" in bench.said
    assert bench.lost == {1: bench.said[-1]}
    assert bench.pool.update(3) == {"version": 3}
    assert bench.handle.ready == [0]
    assert not bench.pool.coming


@pytest.mark.parametrize("bench", [0], indirect=True)
def test_when_the_last_engine_is_left_out_the_run_ends(bench: Bench) -> None:
    bench.begin()
    for processes in bench.processes.values():
        os.kill(processes[0].pid, signal.SIGKILL)
    until(lambda: bench.supervisor.failure is not None)
    assert "no engine is left: the last one, engine " in str(bench.supervisor.failure)
    with pytest.raises(RoleDied, match="no engine is left"):
        bench.pool.rescue()


def test_an_engine_that_stands_still_is_ended_and_started_again_and_its_silence_ends_nothing(bench: Bench) -> None:
    bench.begin()
    stopped = bench.processes[0]
    os.kill(stopped[0].pid, signal.SIGSTOP)
    until(lambda: bool(bench.said))
    assert f"was not heard from for {LIMIT:g} s" in bench.said[0]
    until(lambda: stopped[0].poll() == -signal.SIGKILL)
    bench.until_back(0, 2)
    assert bench.supervisor.failure is None


def test_an_engine_without_memory_is_started_again_and_what_else_it_raises_ends_the_run(bench: Bench) -> None:
    bench.begin()
    failed = "generate failed on rollout rank 2"
    assert not bench.engines.goes_on_without(1, RemoteError(f"{failed}: ValueError: no"))
    assert bench.engines.goes_on_without(1, RemoteError(f"{failed}: OutOfMemoryError: CUDA out of memory"))
    assert list(bench.lost) == [1]
    bench.until_back(1, 2)


def test_no_engine_starts_on_a_node_that_the_run_has_given_up(bench: Bench) -> None:
    """Both fall silent, and with them their node: of the two spares one was left out before."""
    bench.begin()
    bench.launcher.engines.spares = ["n2", "n3"]
    bench.engines.leave_out(bench.ranks.engine_nodes, ["n2"])
    for process in (*bench.processes[0], *bench.processes[1]):
        os.kill(process.pid, signal.SIGSTOP)
    until(lambda: len(bench.launcher.engines.places) == 2)
    assert {node for _, node in bench.launcher.engines.places} == {"n3"}


def test_where_all_engines_die_the_pool_has_none_until_one_is_back(bench: Bench) -> None:
    bench.begin()
    for processes in bench.processes.values():
        os.kill(processes[0].pid, signal.SIGKILL)
    until(lambda: bench.handle.ready == [])
    assert bench.engines.all_lost
    assert bench.pool.update(2) == {}
    until(lambda: bool(bench.pool.rescue()))
    assert not bench.engines.all_lost


def test_a_role_that_starts_where_a_node_has_died_does_not_wait_for_its_ranks(tmp_path: Path) -> None:
    """The critic's ranks would have `timeout.connect` to come, and their node is dead."""
    shares = [NodeShare(f"n{1 + e}", (0, 1), (2 * e, 2 * e + 1), ((e, 0), (e, 1))) for e in RANK]
    critic = NodeShare("n2", (2,), (0,))
    bench = Bench(tmp_path, 1, RankMap(TOPOLOGY, {"rollout": shares, "critic": [critic]}))
    try:
        bench.begin()
        for process in bench.processes[1]:
            os.kill(process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(RoleDied, match="role critic died: rank 0 on n2 is lost before its hello: nothing was"):
            bench.starting.result(HANG_S)
        assert time.monotonic() - begun < bench.config.timeout.connect / 2
        until(lambda: bench.supervisor.silent_nodes() == {"n2"}, "the silence of the engine's ranks there")
    finally:
        bench.supervisor.stop()
