"""Ranks of a role in processes of their own, called as the conductor calls them, without torchrun."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from waiting import HANG_S, until
from warm_runs import WarmRank

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import RunError
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.calls import EngineCalls, RankCalls
from slurm_rlhf.wire.handles import ControlServer, EngineHandle, gather
from slurm_rlhf.wire.messages import Peer


def config(model: Path, run_dir: Path, *, engines: int = 1, tp: int = 1, dtype: str = "fp32") -> Config:
    made = Config()
    made.run_dir = str(run_dir)
    made.actor.model_name_or_path = str(model)
    made.ds.param_dtype = dtype
    made.data.max_len = 320
    made.vllm.max_num_seqs = 16
    made.vllm.num_engines = engines
    made.vllm.tensor_parallel_size = tp
    return made


class Ranks:
    """The ranks of a role, and a server that they come to."""

    def __init__(self, role: str, config: Config, world: int, script: str = "", other: Ranks | None = None) -> None:
        """`script`: what they run in place of the ranks' module; `other`: of the same run, with the same secret."""
        from torch.distributed import TCPStore

        self.role = role
        self.config = config
        self.world = world
        self.directory = RunDirectory(Path(config.run_dir))
        self.directory.make()
        self.directory.config.write_text(dump_toml(config))
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        keys = RunKeys.create(self.directory.keys)
        if other is not None:
            shutil.copy(other.directory.keys, self.directory.keys)
            keys = RunKeys.load(self.directory.keys)
        self.server = ControlServer(keys, on_lost=self._lost, on_event=self._stated)
        self.ranks: dict[int, WarmRank] = {}
        self._script = script

    def launch(self, ranks: list[int] | None = None, **environment: str) -> None:
        """Start the processes of `ranks`, as torchrun would."""
        arguments = [f"--role={self.role}", f"--run_dir={self.directory.root}", f"--endpoint={self.server.endpoint()}"]
        arguments += ["--first_rank=0", f"--world={self.world}"]
        common = {"WORLD_SIZE": str(self.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", **environment}
        for rank in range(self.world) if ranks is None else ranks:
            stated = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", **common}
            self.ranks[rank] = WarmRank(arguments, stated, self._script)

    def kill(self, rank: int) -> None:
        self.ranks[rank].kill()

    def ended(self, ranks: list[int]) -> None:
        """Wait until all of `ranks` are gone."""
        until(lambda: all(self.ranks[rank].poll() is not None for rank in ranks), f"the end of ranks {ranks}")

    def log(self, rank: int | str = "*") -> str:
        return "".join(path.read_text() for path in self.directory.logs.glob(f"{self.role}.*.{rank}.log"))

    def close(self) -> None:
        """Kill what is left of it."""
        for process in self.ranks.values():
            process.kill()
        self.ended(list(self.ranks))
        self.server.close()

    def _stated(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        self._lost(peer, event, data)

    def _lost(self, peer: Peer, *what: Any) -> None:
        self.server.fail_role(self.role, RunError(f"{peer} is lost: {peer.lost} {what}"))


class RolloutFleet(Ranks):
    """`engines` engines of `tp` ranks. `events` collects (rank, event, data) of everything they tell unasked."""

    def __init__(self, config: Config, script: str = "") -> None:
        self.tp = config.vllm.tensor_parallel_size
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        super().__init__("rollout", config, config.vllm.num_engines * self.tp, script)
        self.engines = EngineHandle(self.server, "rollout", self.world, self.tp, config.timeout)

    def start(self) -> None:
        """Launch what is not launched, and start all engines."""
        self.launch([rank for rank in range(self.world) if rank not in self.ranks])
        gather(self.starting())

    def starting(self) -> list[Future[Any]]:
        self.server.wait_for("rollout", self.world, HANG_S)
        return self.engines.start_all(EngineCalls.start, 1)

    def shut_down(self) -> list[int | None]:
        """As the conductor does at the end of a run; exit codes."""
        here = [rank for rank, process in self.ranks.items() if process.poll() is None]
        calls = [self.engines.ask(rank, RankCalls.shutdown) for rank in here]
        gather(calls)
        self.ended(list(self.ranks))
        return [process.poll() for process in self.ranks.values()]

    def _lost(self, peer: Peer, *what: Any) -> None:
        """As a test looks for it."""

    def _stated(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        self.events.append((peer.rank, event, data))
