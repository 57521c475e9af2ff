"""Ranks of a role in processes of their own, called as the conductor calls them, without torchrun."""

from __future__ import annotations

import shutil
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from waiting import HANG_S, until
from zygote import Rank, WarmRank, Zygote

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import RunError
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.calls import EngineCalls
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


class RolloutFleet:
    """`engines` engines of `tp` ranks. `events` collects (rank, event, data) of everything they tell unasked."""

    def __init__(self, zygote: Zygote, config: Config, script: str = "") -> None:
        """`script`: what the ranks run in place of the worker's module."""
        from torch.distributed import TCPStore

        self.config = config
        self.tp = config.vllm.tensor_parallel_size
        self.world = config.vllm.num_engines * self.tp
        self.directory = RunDirectory(Path(config.run_dir))
        self.directory.make()
        self.directory.config.write_text(dump_toml(config))
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.server = ControlServer(RunKeys.create(self.directory.keys), on_event=self._told)
        self.engines = EngineHandle(self.server, "rollout", self.world, self.tp, config.timeout)
        self.ranks: dict[int, Rank] = {}
        self._zygote = zygote
        self._script = script

    def launch(self, ranks: list[int] | None = None, **environment: str) -> None:
        """Start the processes of `ranks`, as torchrun would."""
        arguments = ["--role=rollout", f"--run_dir={self.directory.root}", f"--endpoint={self.server.endpoint()}"]
        arguments += ["--first_rank=0", f"--world={self.world}"]
        for rank in range(self.world) if ranks is None else ranks:
            torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "MASTER_PORT": self.store.port}
            told = {name: str(value) for name, value in torchrun.items()} | {"MASTER_ADDR": "127.0.0.1", **environment}
            self.ranks[rank] = self._zygote.fork(arguments, told, self._script)

    def start(self) -> None:
        """Launch what is not launched, and start all engines."""
        self.launch([rank for rank in range(self.world) if rank not in self.ranks])
        gather(self.starting())

    def starting(self) -> list[Future[Any]]:
        self.server.wait_for("rollout", self.world, HANG_S)
        return self.engines.start_all(EngineCalls.start, 1)

    def kill(self, rank: int) -> None:
        self.ranks[rank].send_signal(signal.SIGKILL)

    def ended(self, ranks: list[int]) -> None:
        """Wait until all of `ranks` are gone."""
        until(lambda: all(self.ranks[rank].poll() is not None for rank in ranks), f"the end of ranks {ranks}")

    def log(self, rank: int) -> str:
        return "".join(path.read_text() for path in self.directory.logs.glob(f"rollout.*.{rank}.log"))

    def close(self) -> None:
        """Kill what is left of it."""
        for process in self.ranks.values():
            process.send_signal(signal.SIGKILL)
        self.ended(list(self.ranks))
        self.server.close()

    def shut_down(self) -> list[int | None]:
        """As the conductor does at the end of a run; exit codes."""
        calls = [self.engines.shut_down(rank) for rank, process in self.ranks.items() if process.poll() is None]
        gather(calls)
        self.ended(list(self.ranks))
        return [process.poll() for process in self.ranks.values()]

    def _told(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        self.events.append((peer.rank, event, data))


class WarmRanks:
    """A role whose processes live on from cell to cell."""

    def __init__(self, zygote: Zygote, root: Path, role: str, count: int) -> None:
        from torch.distributed import TCPStore

        self.role = role
        self.count = count
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        common = {"WORLD_SIZE": str(count), "MASTER_PORT": str(self.store.port)}
        self.processes = [
            WarmRank(zygote, root / f"{role}.{count}.{rank}", **common, **number) for rank, number in enumerate(numbers)
        ]

    def live(self, config: Config, other: Config | None = None) -> ControlServer:
        """`other`: of a role that lives already, whose run this is a part of: they have the same secret."""
        directory = RunDirectory(Path(config.run_dir))
        directory.make()
        directory.config.write_text(dump_toml(config))

        def broken(peer: Peer, *what: Any) -> None:
            server.fail_role(self.role, RunError(f"{peer} is lost: {peer.lost} {what}"))

        keys = RunKeys.create(directory.keys)
        if other is not None:
            shutil.copy(RunDirectory(Path(other.run_dir)).keys, directory.keys)
            keys = RunKeys.load(directory.keys)
        server = ControlServer(keys, on_lost=broken, on_event=broken)
        where = [f"--run_dir={directory.root}", f"--endpoint={server.endpoint()}", f"--world={self.count}"]
        for rank, process in enumerate(self.processes):
            # vLLM overwrites what torchrun would have set, and this life's store keys must not be the last one's.
            fresh = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": str(directory.root)}
            process.live([f"--role={self.role}", "--first_rank=0", *where], fresh)
        return server

    def log(self, run_dir: str) -> str:
        return "\n".join(path.read_text()[-3000:] for path in Path(run_dir).glob("logs/*"))

    def end(self) -> None:
        for process in self.processes:
            process.end()
