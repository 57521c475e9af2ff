"""Be the agent of a node: `python -m slurm_rlhf.nodes.agent` is the task of every step.

The agents of the step `nodes` stay from before a run to its end: they examine their nodes (`examiner`), and look at its
processes in a hang. In the step of a role an agent is the parent of the role's processes there: the conductor says what
to start (`nodes.agent_steps`), and hears how that ends. In the step `workers` it has those of the conductor's pools.
Without Slurm one agent is all of this. Imports no torch, and never forks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.local_directory import LocalDirectory, take_temporary
from slurm_rlhf.cluster.network import LOOPBACK, addresses, listening, own_address, unreachable
from slurm_rlhf.cluster.processes import CONDUCTOR_GONE_STATUS, STORE_FD, die_with_parent, exit_text, process_state
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.errors import CallTimeout, PlacementError, RoleDied
from slurm_rlhf.nodes.child_process import start_child
from slurm_rlhf.nodes.environment import IGNORED, INTERFACES, interface_to_others, node_environment, visible_gpus
from slurm_rlhf.nodes.examiner import Examiner
from slurm_rlhf.nodes.facts import NODES, VARIABLE, WORKER_MODULE, Orders, StepSpec, share_on, torchrun_command
from slurm_rlhf.nodes.node_look import look
from slurm_rlhf.nodes.requeue import await_end
from slurm_rlhf.placement.rank_map import RankMap, TpGroup
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.messages import Request
from slurm_rlhf.workers.distant import HostedWorkers


@dataclass(slots=True)
class _Engine:
    group: TpGroup
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    how: str = ""  # how the engine ended; empty: it runs


class EngineRanks:
    """Starts and watches the ranks of the engines on one node. Used by one thread, which must outlive them.

    torchrun would end all engines when one rank ends, but engines do not need each other: each rank is a child of its
    own, and only the ranks of one engine end together.
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
        """`arguments`, `environment`: what all ranks have in common; the environment is otherwise complete.

        `only`: numbers of the node's engines that are started; None: all.
        """
        self._logs = run_dir / "logs"
        self._node = node
        self._share = share_on(ranks, ROLLOUT, node)
        self._arguments = [*arguments, f"--world={ranks.world(ROLLOUT)}"]
        self._environment = dict(environment)
        groups = [group for group in ranks.tp_groups if group.role == ROLLOUT and group.node == node]
        self._engines = {group.engine: _Engine(group) for group in groups if only is None or group.engine in only}

    def start(self) -> None:
        """Start all ranks."""
        for engine in self._engines.values():
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
                if opens:
                    variables[STORE_FD] = str(store.fileno())
                log = self._logs / f"{ROLLOUT}.{self._node}.{rank}.start.log"
                # A rank is --first_rank plus LOCAL_RANK; if an engine has moved to another node, the ranks have gaps.
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
                code, rank, pid = min(gone)  # killed by a signal (negative): it ended before its peers
                engine.how = (
                    f"rank {rank} of engine {engine.group.engine} on {self._node} (pid {pid}) {exit_text(code)}"
                )
                news.append((engine.group.engine, engine.how))
                self._kill(engine)
        return news

    @property
    def running(self) -> bool:
        """Tell whether a rank is left."""
        return any(not self.gone(number) for number in self._engines)

    @property
    def conductor_gone(self) -> bool:
        """Tell whether a rank has left because it heard nothing of the conductor."""
        ranks = (process for engine in self._engines.values() for process in engine.ranks)
        return any(process.poll() == CONDUCTOR_GONE_STATUS for process in ranks)

    def has(self, number: int) -> bool:
        """Tell whether a rank of an engine is left here."""
        return number in self._engines and not self.gone(number)

    def gone(self, number: int) -> bool:
        """Tell whether no rank of an engine is left."""
        return all(process.poll() is not None for process in self._engines[number].ranks)

    def end(self, number: int, how: str = "") -> None:
        """End what is left of an engine by force; `ended` reports it, unless `how` says why."""
        engine = self._engines[number]
        engine.how = engine.how or how
        self._kill(engine)

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


class Agent:
    """Does on one node what the conductor asks, is the parent of what it starts there, and ends with the conductor.

    Used from the main thread, in which all processes are started: they end with that.
    """

    def __init__(self, orders: Orders, node: str) -> None:
        self._orders = orders
        self._node = node
        self._examiner = Examiner(orders, node)
        self._spec: StepSpec | None = None
        self._ranks: RankMap | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # role -> its torchrun, or the rank of an MPI start
        self._engines: list[EngineRanks] = []  # one for each start
        self._workers = HostedWorkers()
        self._temporary: LocalDirectory | None = None
        self._code: int | None = None  # exit status of the process that ended last
        self._leaving = False

    def _client(self) -> ControlClient:
        return client_of(self._orders, f"{self._orders.step or NODES} {self._node}", self._node)

    def serve(self) -> int:
        """Obey until all is over, or the conductor is gone; return the exit status. Raises PlacementError."""
        with self._client() as client, suppress(RoleDied):
            if not self._orders.step and (problem := _absence(client, self._orders)):
                where = f"{self._orders.address}:{self._orders.port}"
                own = ", ".join(str(each) for _, each in addresses())
                print(
                    f"{self._node} cannot reach the conductor at {where}: {problem}; it has {own}. Let a firewall pass "
                    "connections between the job's nodes",
                    flush=True,
                )
                return 0
            client.event("here")
            while not self._over:
                if (request := client.receive(timeouts.POLL_S)) is not None:
                    self._obey(request)
                for role, engine, how in self._ends():
                    client.event("ended", role=role, engine=engine, how=how)
        self._end()
        code = self._code or 0
        return code if code >= 0 else 128 - code

    def _ends(self) -> Iterator[tuple[str, int | None, str]]:
        """Yield what has ended since the last call: the role, an engine or None for its process, and how."""
        for role, process in list(self._processes.items()):
            if (code := process.poll()) is not None:
                self._code = code
                del self._processes[role]
                yield role, None, exit_text(code)
            elif process_state(process.pid).startswith("T"):
                # torchrun serves the store of its ranks: without it those that start would wait for ever.
                print(f"{self._node}: a signal has stopped the process of {role}: SIGCONT lets it go on", flush=True)
                process.send_signal(signal.SIGCONT)
        for engine, how in (news for engines in self._engines for news in engines.ended()):
            print(f"engine {engine}: {how}", flush=True)
            yield ROLLOUT, engine, how

    @property
    def _over(self) -> bool:
        of_role = bool(self._orders.step) and self._code is not None
        return of_role or (self._leaving and not self._running)

    @property
    def _running(self) -> bool:
        processes = any(process.poll() is None for process in self._processes.values())
        return processes or any(engines.running for engines in self._engines)

    def _obey(self, request: Request) -> None:
        match request.method:
            case "start":
                spec, ranks = request.argument(tuple[StepSpec, dict[str, Any]])
                request.reply(self._start(spec, RankMap.from_json(ranks)))
            case "end":  # for an engine whose processes are stopped, and do not hear the conductor
                engine = request.argument(int)
                for engines in self._with(engine):
                    engines.end(engine)
                request.reply()
            case "leave":
                self._leaving = True
                request.reply()
            case "kill":
                self._kill(request.argument(list[str]))
                request.reply()
            case "introduce":
                request.reply(self._examiner.introduce())
            case "examined":
                self._examiner.close()
                request.reply()
            case _:
                request.answer_apart(partial(self._slow, request))

    def _with(self, engine: int) -> list[EngineRanks]:
        return [engines for engines in self._engines if engines.has(engine)]

    def _slow(self, request: Request) -> Any:
        """Return the answer to a request that takes its time, and starts no process that must outlast the thread."""
        match request.method:
            case "facts":
                return self._examiner.facts(request.argument(dict[str, int]))
            case "groups":
                return self._examiner.groups(request.argument(dict[str, Any]))
            case "open" | "do" | "stack" | "close":
                key, given = request.argument(tuple[str, str])
                return getattr(self._workers, request.method)(key, *json.loads(given))
            case _:
                return look(self._node, request.argument(list[int]))

    def _environment(self, spec: StepSpec, ranks: RankMap, own: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of the role's processes here; `own`: variables that win."""
        self._temporary = self._temporary or take_temporary()
        interface = interface_to_others(ranks, self._node)
        logs = Path(spec.run_dir) / "logs"
        return node_environment(os.environ, spec.role, logs, self._temporary.path, own, interface, spec.caches)

    def _start(self, spec: StepSpec, ranks: RankMap) -> str:
        """Start what is asked for; return where other nodes of a role find this one, as `StepSpec.store`."""
        self._spec, self._ranks = spec, ranks
        share = share_on(ranks, spec.role, self._node)
        own = {**spec.environment[self._node], **visible_gpus(ranks.topology, self._node, share.gpus, os.environ)}
        slots = ",".join(map(str, share.gpus))
        print(f"{self._node}: ranks {share.ranks[0]} to {share.ranks[-1]} of {spec.role}, slots {slots}")
        environment = self._environment(spec, ranks, own)
        chosen = ", ".join(f"{name}={environment.get(name, '')}" for name in INTERFACES)
        towards = interface_to_others(ranks, self._node) or "unknown"
        print(
            f"{self._node}: {chosen} (interface to the other nodes: {towards}; export these to choose others)",
            flush=True,
        )
        if ROLES[spec.role].kind == "engine":
            for number in spec.engines or ():
                for engines in self._with(number):
                    engines.end(number, "was ended")
            run_dir = Path(spec.run_dir)
            self._engines.append(EngineRanks(run_dir, ranks, self._node, spec.arguments, environment, spec.engines))
            self._engines[-1].start()
            return ""
        command = torchrun_command(spec, ranks, self._node, f"{environment['TMPDIR']}/torchrun")
        # torchrun would end its workers at SIGTERM, and with them what they have not saved.
        command[3:3] = ["--signals-to-handle=SIGINT"]
        log = RunDirectory(Path(spec.run_dir)).role_log(spec.role, self._node, "torchrun")
        if len(ranks.roles[spec.role]) == 1 or spec.store:
            self._processes[spec.role] = start_child(command, log, environment)
            return ""
        # The port is bound here, and the socket handed down: no other process can take it in between.
        address = own_address(self._node, environment.get("GLOO_SOCKET_IFNAME", ""))
        with listening(address) as store:
            environment[STORE_FD] = str(store.fileno())
            self._processes[spec.role] = start_child(command, log, environment, pass_fds=(store.fileno(),))
            return f"{address}:{store.getsockname()[1]}"

    def _end(self) -> None:
        """End what is left. Ranks that miss the conductor leave by themselves, and one of their nodes ends the job."""
        wait_until(lambda: not self._running, timeouts.RANKS_LEAVE_S, 0.05, 0.05)
        conductor_gone = any(engines.conductor_gone for engines in self._engines)
        self._kill([*self._processes, ROLLOUT])
        self._workers.close()
        self._examiner.close()
        if self._temporary is not None:
            self._temporary.remove()
        if self._spec and self._ranks and conductor_gone:
            await_end(self._spec, self._ranks, self._node, (self._orders.address, self._orders.port))

    def _kill(self, roles: Collection[str]) -> None:
        """End every process of `roles` by force, and wait for it; `_ends` does not report these."""
        for role in self._processes.keys() & set(roles):
            process = self._processes.pop(role)
            process.kill()
            self._code = process.wait()
        for engines in self._engines if ROLLOUT in roles else ():
            engines.kill()
        self._engines = [] if ROLLOUT in roles else self._engines


def client_of(orders: Orders, name: str, node: str, rank: int = 0, world: int = 1) -> ControlClient:
    """Begin to connect an agent to the conductor, which knows it by `name` and `rank`."""
    return ControlClient(
        f"tcp://{orders.address}:{orders.port}",
        RunKeys.parse(orders.keys, "the agent's orders"),
        name,
        rank,
        world,
        host=node,
        heartbeat_interval=orders.beat_s,
        heartbeat_limit=orders.silent_s,
    )


def _absence(client: ControlClient, orders: Orders) -> str:
    """Say why the conductor cannot be reached; empty: it was. Raises RoleDied when it has gone."""
    said = ""
    for patience_s in (timeouts.CONNECT_S, orders.limit_s):
        try:
            client.connect(patience_s)
            return ""
        except CallTimeout as error:
            said = str(error)
        if why := unreachable(orders.address, orders.port):
            return why
    return said  # its port is open, but it does not answer


def main() -> None:
    orders, node = Orders.from_environment(os.environ), node_name()
    os.environ.pop(VARIABLE)  # torchruns and engines need no keys of agents
    die_with_parent(os.getppid())
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        sys.exit(Agent(orders, node).serve())
    except PlacementError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
