"""Engines that come late or never, with ranks that are real processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hang_peer import HangPeers
from waiting import until

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, RemoteError, RoleDied
from slurm_rlhf.groups.engine_pool import EnginePool
from slurm_rlhf.groups.engines import Engines as KnownEngines
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.weights.lead import EngineLost

CONNECT_S = 1.0


class Engines(HangPeers):
    """Implements `nodes.launcher.Launcher`: two engines of one rank, each started by hand."""

    def start(self, role: str, arguments: list[str], environment: Mapping[str, Mapping[str, str]]) -> None:
        self.endpoint = next(word for word in arguments if word.startswith("--endpoint=")).partition("=")[2]

    def come(self, rank: int) -> None:
        self.add(self.endpoint, "rollout", rank, 20, self.directory.logs / f"{rank}.log")


class Weights:
    """Stands in for `WeightSync`: notes which engines were connected for which update."""

    def __init__(self) -> None:
        self.connected: list[int] = []
        self.updates: list[tuple[int, list[int]]] = []

    def connect(self, parameters: object, engines: list[int]) -> None:
        self.connected = engines

    def update(self, version: int) -> dict[str, float]:
        self.updates.append((version, self.connected))
        return {}


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[Supervisor, Engines]]:
    directory = RunDirectory(tmp_path / "run")
    directory.make()
    config = Config()
    config.timeout.heartbeat_interval, config.timeout.shutdown, config.timeout.connect = 0.2, 1.0, CONNECT_S
    engines = Engines(directory)
    ranks = place(Topology.uniform(["n1"], 2), [RoleSize("rollout", 1, 2, tp=1, engines=2)])
    supervisor = Supervisor(config, directory, ranks, engines)  # type: ignore[arg-type]
    supervisor.start({"rollout": {}})
    try:
        yield supervisor, engines
    finally:
        supervisor.stop()


def pool_of(supervisor: Supervisor, weights: Weights, notes: list[str], all_at_once: bool) -> EnginePool:
    handle = supervisor.roles["rollout"]
    engines = supervisor.engines
    engines.begin(all_at_once, notes.append)
    return EnginePool(supervisor, engines, handle, weights, all_at_once)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_goes_on_without_an_engine_that_never_comes_and_takes_one_that_comes_late(
    parts: tuple[Supervisor, Engines],
) -> None:
    supervisor, engines = parts
    weights, notes = Weights(), []
    engines.come(0)
    until(lambda: supervisor.here("rollout") == {0}, "the first engine")
    pool = pool_of(supervisor, weights, notes, all_at_once=False)
    assert pool.wait([]) == [0]
    until(lambda: bool(notes), "the warning")
    assert "engine 1: rollout rank 1 did not say hello within 1 s" in notes[0]
    assert "The run goes on without them" in notes[0]
    assert supervisor.failure is None
    pool.update(1)
    assert weights.updates == [(1, [0])]
    engines.come(1)
    until(lambda: pool.admit(2) == [1], "the late engine")
    assert weights.updates[-1] == (2, [1])
    pool.update(3)
    assert weights.updates[-1] == (3, [0, 1])
    assert len(notes) == 1


@pytest.mark.parametrize("all_at_once", [True, False])
def test_without_any_engine_or_where_all_are_needed_the_run_ends(
    parts: tuple[Supervisor, Engines], all_at_once: bool
) -> None:
    supervisor, engines = parts
    if all_at_once:
        engines.come(0)
        until(lambda: supervisor.here("rollout") == {0}, "the first engine")
    pool = pool_of(supervisor, Weights(), [], all_at_once)
    with pytest.raises(CallTimeout, match="did not say hello within 1 s"):
        pool.wait([])
    until(lambda: isinstance(supervisor.failure, CallTimeout), "the end of the run")


def test_an_engine_that_is_lost_during_an_update_is_done_without(parts: tuple[Supervisor, Engines]) -> None:
    supervisor, engines = parts

    class Losing(Weights):
        def update(self, version: int) -> dict[str, float]:
            super().update(version)
            if len(self.updates) == 1:
                raise EngineLost("engine 0 was lost")
            return {"sync_s": 1.0}

    weights = Losing()
    engines.come(0)
    until(lambda: supervisor.here("rollout") == {0}, "the first engine")
    pool = pool_of(supervisor, weights, [], all_at_once=False)
    assert pool.wait([]) == [0]
    assert pool.update(1) == {"sync_s": 1.0}
    assert weights.updates == [(1, [0]), (1, [0])]


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("armed", [True, False])
def test_which_failed_calls_of_an_engine_a_run_survives(armed: bool, gone: bool) -> None:
    put: list[int] = []
    own: Any = SimpleNamespace(armed=armed, alone=gone, _peers_lost=lambda _: gone, lost=lambda *_: True)
    own._put = lambda engine, version: put.append(engine)
    broken, memory = (RemoteError(f"rollout 0: {kind}: no") for kind in ("EngineBroken", "OutOfMemoryError"))
    errors = (broken, RoleDied("no"), memory, RemoteError("no"))
    found = [KnownEngines.goes_on_without(own, engine, error) for engine, error in enumerate(errors)]
    assert found == ([True, True, True, False] if armed else [gone, False, False, False])
    assert put == ([0, 1] if armed and gone else [0] * armed)
