"""Keep the engines of one node: `python -m slurm_rlhf.nodes.engine_node SPEC.json`, run by the step of a job.

How an engine ended is told through a file of the run directory, because nobody listens to this process; and a file
there says that an engine is to be ended.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rlhf.cluster.local_directory import LocalDirectory, take_temporary
from slurm_rlhf.cluster.network import LOOPBACK
from slurm_rlhf.cluster.processes import CONDUCTOR_GONE_STATUS, STORE_FD, STORE_RANKS, exit_text
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.nodes.child_process import start_child
from slurm_rlhf.nodes.headless import become_heir
from slurm_rlhf.nodes.node import begun, interface_to_others, node_environment, read_spec, visible_gpus
from slurm_rlhf.nodes.step_spec import WORKER_MODULE, StepSpec, share_on
from slurm_rlhf.placement.rank_map import RankMap, TpGroup
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.run_directory import write_atomically


@dataclass(slots=True)
class _Engine:
    group: TpGroup
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    how: str = ""  # it ended


class EngineRanks:
    """Starts and watches the ranks of the engines on one node. Used by one thread, which must outlive them.

    A role's torchrun ends all of its processes when one of them ends. Engines that only answer prompts are better
    apart: each rank is a child of its own, and only the ranks of one engine end together.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: RankMap,
        node: str,
        arguments: list[str],
        environment: Mapping[str, str],
        only: Sequence[int] | None = None,
    ) -> None:
        """`arguments`: of every rank; `environment`: the whole one of every rank, but for what tells them apart.

        `only`: the engines of the node that this is about; None: all.
        """
        self._logs = run_dir / "logs"
        self._node = node
        self._share = share_on(ranks, ROLLOUT, node)
        self._arguments = [*arguments, f"--world={ranks.world(ROLLOUT)}"]
        self._environment = dict(environment)
        self._gpus = ranks.topology.accelerator == GPU
        groups = [group for group in ranks.tp_groups if group.role == ROLLOUT and group.node == node]
        self._engines = {group.engine: _Engine(group) for group in groups if only is None or group.engine in only}

    def start(self) -> None:
        """Start all ranks."""
        for engine in self._engines.values():
            self._start(engine)

    def start_again(self, number: int) -> None:
        """Start the ranks of an engine that has ended."""
        engine = self._engines[number]
        self._kill(engine)
        for process in engine.ranks:
            process.wait()
        engine.ranks, engine.how = [], ""
        self._start(engine)

    def _start(self, engine: _Engine) -> None:
        """Start the ranks of an engine; where there are several, the first opens the store at which they meet.

        The port is bound here, and the socket handed down: no other process can take it in between.
        """
        with socket.create_server((LOOPBACK, 0)) as store:
            for tp_rank, rank in enumerate(engine.group.ranks):
                local = self._share.ranks.index(rank)
                variables = {
                    **self._environment,
                    "LOCAL_RANK": str(local),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(store.getsockname()[1]),
                }
                opens = tp_rank == 0 and len(engine.group.ranks) > 1
                if len(engine.group.ranks) > 1 and not self._gpus:  # NCCL makes connections when it likes
                    variables[STORE_RANKS] = str(len(engine.group.ranks))
                if opens:
                    variables[STORE_FD] = str(store.fileno())
                log = self._logs / f"{ROLLOUT}.{self._node}.{rank}.start.log"
                # A worker adds the two; where an engine has moved to another node the ranks here have gaps.
                command = [sys.executable, "-m", WORKER_MODULE, *self._arguments, f"--first_rank={rank - local}"]
                fds = (store.fileno(),) if opens else ()
                engine.ranks.append(start_child(command, log, variables, pass_fds=fds))

    def ended(self) -> list[tuple[int, str]]:
        """Return (engine, how) of the engines that ended since the last call; ranks that are left of one are ended."""
        news = []
        for engine in self._engines.values():
            if engine.how:
                continue
            ranks = zip(engine.ranks, engine.group.ranks, strict=True)
            gone = [(code, rank, process.pid) for process, rank in ranks if (code := process.poll()) is not None]
            if gone:
                code, rank, pid = min(gone)  # a signal first: a rank whose peer is gone ends by itself
                engine.how = (
                    f"rank {rank} of engine {engine.group.engine} on {self._node} (pid {pid}) {exit_text(code)}"
                )
                news.append((engine.group.engine, engine.how))
                self._kill(engine)
        return news

    @property
    def numbers(self) -> list[int]:
        """List the engines."""
        return list(self._engines)

    @property
    def running(self) -> bool:
        """Tell whether a rank is left."""
        return any(not self.gone(number) for number in self._engines)

    @property
    def deserted(self) -> bool:
        """Tell whether a rank has left because it heard nothing of the conductor."""
        ranks = (process for engine in self._engines.values() for process in engine.ranks)
        return any(process.poll() == CONDUCTOR_GONE_STATUS for process in ranks)

    def gone(self, number: int) -> bool:
        """Tell whether no rank of an engine is left."""
        return all(process.poll() is not None for process in self._engines[number].ranks)

    def end(self, number: int) -> None:
        """End what is left of an engine by force; that it ended is no news."""
        engine = self._engines[number]
        engine.how = engine.how or "was ended"
        self._kill(engine)

    def kill_engine(self, number: int) -> None:
        """End what is left of an engine by force; `ended` tells of it."""
        self._kill(self._engines[number])

    def kill(self) -> None:
        """End every rank by force, and wait for it."""
        for engine in self._engines.values():
            self._kill(engine)
        for engine in self._engines.values():
            for process in engine.ranks:
                process.wait()

    @staticmethod
    def _kill(engine: _Engine) -> None:
        for process in engine.ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


POLL_S = 0.2
_LOOKS_S = 1.0
"""Between two looks for orders, on a file system that all nodes share."""


def ended_file(run_dir: Path, run_id: str, engine: int) -> Path:
    """Name the file that says how an engine of one start ended."""
    return run_dir / ".control" / f"ended.{run_id}.{engine}"


def end_file(run_dir: Path, run_id: str, engine: int) -> Path:
    """Name the file that tells the node of an engine to end what is left of it."""
    return run_dir / ".control" / f"end.{run_id}.{engine}"


def main() -> None:
    spec, engines, temporary = begun(prepare)
    engines.start()
    looked = time.monotonic()
    while engines.running:
        tell(spec, engines)
        time.sleep(POLL_S)
        if time.monotonic() - looked > _LOOKS_S:
            looked = time.monotonic()
            obey(spec, engines)
    tell(spec, engines)
    temporary.remove()
    if engines.deserted:
        become_heir(Path(sys.argv[1]))


def obey(spec: StepSpec, engines: EngineRanks) -> None:
    """End the engines that are to be ended: a process that is stopped does not hear its conductor."""
    for engine in engines.numbers:
        # Unlike Path.exists, os.path.exists is false where the file system does not answer this look.
        if not engines.gone(engine) and os.path.exists(end_file(Path(spec.run_dir), spec.run_id, engine)):
            engines.kill_engine(engine)


def tell(spec: StepSpec, engines: EngineRanks) -> None:
    """Write down which engines have ended."""
    for engine, how in engines.ended():
        print(f"engine {engine}: {how}", flush=True)
        try:
            write_atomically(ended_file(Path(spec.run_dir), spec.run_id, engine), how)
        except OSError as error:  # the disk is full; heartbeats say the same a little later
            print(f"engine {engine}: {error}", flush=True)


def prepare(file: Path, environ: Mapping[str, str]) -> tuple[StepSpec, EngineRanks, LocalDirectory]:
    """Read the specification of the step; make the engines of this node, and the directory of their temporary files."""
    spec, ranks, node = read_spec(file, environ)
    share = share_on(ranks, ROLLOUT, node)
    own = {**spec.environment[node], **visible_gpus(ranks.topology, node, share.gpus, environ)}
    temporary = take_temporary()
    run_dir = Path(spec.run_dir)
    interface = interface_to_others(ranks, node)
    environment = node_environment(environ, ROLLOUT, run_dir / "logs", temporary.path, own, interface)
    print(f"{node}: ranks {share.ranks[0]} to {share.ranks[-1]}, slots {','.join(map(str, share.gpus))}", flush=True)
    return spec, EngineRanks(run_dir, ranks, node, spec.arguments, environment, spec.engines), temporary


if __name__ == "__main__":
    main()
