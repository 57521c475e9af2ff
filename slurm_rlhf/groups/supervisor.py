"""Starts every process of a run, watches it, and ends all of them together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.network import LOOPBACK
from slurm_rlhf.cluster.processes import raise_descriptors, running
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, RemoteError, RoleDied, RunError
from slurm_rlhf.groups.deaths import Deaths, RoleRanks, Silence, StartLogs, conductor_stood_still
from slurm_rlhf.groups.engines import Engines
from slurm_rlhf.groups.restarts import Unit
from slurm_rlhf.nodes.launcher import EngineEnds, Environment, Launcher, names_in
from slurm_rlhf.nodes.node_look import NodeView
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.calls import RankCalls
from slurm_rlhf.wire.handles import ControlServer, EngineHandle, RoleHandle
from slurm_rlhf.wire.messages import FAILURE, TERMINATION, Peer, Preemption

log = logging.getLogger(__name__)

POLL_S = 0.25


class Supervisor:
    """Starts the process groups of each role and notices within seconds when one of them is gone.

    The first failure fails every pending call of every role, so that the conductor learns of it whatever it waits for.
    Other roles may report errors afterwards, because a member is missing; those do not hide the first.
    """

    def __init__(self, config: Config, directory: RunDirectory, ranks: RankMap, launcher: Launcher) -> None:
        self._config = config
        self._directory = directory
        self._ranks = ranks
        self._launcher = launcher
        raise_descriptors(sum(ranks.worlds.values()))
        # Only where the ranks reach this process, and not on whatever other networks the node has.
        self.server = ControlServer(
            RunKeys.create(directory.keys),
            host=launcher.address,
            heartbeat_interval=config.timeout.heartbeat_interval,
            heartbeat_limit=config.timeout.heartbeat,
            on_lost=self._on_lost,
            on_event=self._on_event,
        )
        self._silence = Silence(self.server, ranks.roles, config.timeout)
        self._leaving = threading.Event()
        self._gone = threading.Event()
        self._preemption = Preemption()
        self._logs = StartLogs(directory)
        self._deaths = Deaths(self._logs)
        self._engine_ends = EngineEnds()
        self._looking = threading.Lock()  # held while ends are looked for, and while roles are ended on purpose
        self._watching = False
        self.failure: Exception | None = None
        """Error that broke the run; None: it is not broken."""
        self.units = {role: Unit(role, nodes, began=time.monotonic()) for role, nodes in _nodes_of(ranks).items()}
        """State of each role. Only the first that fails becomes lost: others may fail because they miss its ranks."""
        self._failure_lock = threading.Lock()
        self.roles: dict[str, RoleHandle[Any]] = {}
        self.engines: Engines | None = None
        """Engines of the run; None: it has none, or they were not started yet."""

    def start(self, environment: Mapping[str, Environment]) -> None:
        """Start all roles, with the variables of `environment[role][node]`; wait until each rank has said hello.

        It does not wait for engines: `Engines.begin` asks those to start that are there.
        Raises RoleDied naming the role that ended instead, CallTimeout naming the ranks that stayed silent.
        """
        self._start(self._ranks.roles, environment)

    def start_again(self, roles: Collection[str], ranks: RankMap, environment: Mapping[str, Environment]) -> None:
        """Start `roles` again, which `end` has ended, as `ranks` has them. All roles get new handles.

        Calls through the old handles have failed. Raises as `start`.
        """
        self._ranks = ranks
        self._start(roles, environment)

    def _start(self, roles: Collection[str], environment: Mapping[str, Environment]) -> None:
        for role in self._ranks.roles:
            if (old := self.roles.get(role)) is not None:
                old.retired = RunError("the call is from before the restart of the role")
            if role in roles:
                arguments = [
                    f"--role={role}",
                    f"--run_dir={self._directory.root}",
                    f"--endpoint={self.server.endpoint()}",
                    *([f"--role_start={number}"] if (number := self.server.starts(role)) else []),
                ]
                self._launcher.start(role, arguments, environment[role])
            self.roles[role] = self._handle(role)
        engines = self.roles.get(ROLLOUT)
        if isinstance(engines, EngineHandle):
            if self.engines is None or ROLLOUT in roles:
                # Where engines share accelerators with trainers, one would measure memory in use while it starts.
                launcher = None if self._config.train.colocate_all else self._launcher.engines
                homes = self._ranks.engine_nodes
                self.engines = Engines(engines, self.server, launcher, homes, self._config, self.fail, self._over)
            else:
                self.engines.renew(engines)
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="supervisor", daemon=True).start()
        for role, handle in self.roles.items():
            if not isinstance(handle, EngineHandle):  # each engine has a state of its own
                try:
                    self.server.wait_for(role, handle.world, self._config.timeout.connect)
                except CallTimeout as error:
                    self._lose_before_hello(role, self._silence.enough_s, str(error))
                    raise self.failure or error from error
            with self._failure_lock:
                if self.units[role].state == "starting":
                    self.units[role] = self.units[role].up()

    def _lose_before_hello(self, role: str, silent_s: float, why: str) -> None:
        """Break the run if ranks of `role` are missing on nodes of which nothing was heard for `silent_s`."""
        gone = self._launcher.agents.unheard(silent_s)
        dead = [share for share in self._ranks.roles[role] if share.node in gone and {*share.ranks} - self.here(role)]
        if dead:
            who = ", ".join(f"rank {share.ranks[0]} on {share.node}" for share in dead)
            what = f"{who} {'is lost before its' if len(dead) == 1 else 'are lost before their'} hello: {why}"
            log = self._directory.logs / f"{role}.srun.log"
            self._fail(role, [share.node for share in dead], what, [log], silent=True)

    def end(self, roles: Collection[str], ranks: RankMap) -> None:
        """End the processes of `roles` by force, so that they can start again as `ranks` has them.

        The failure is forgotten, and the other roles can be called again.
        """
        with self._looking:
            if self.engines is not None:
                self.engines.pause()
            here = self._launcher.address == LOOPBACK
            pids = [peer.pid for role in roles for peer in self.server.peers(role)] if here else []
            self._launcher.end(roles, ranks)
            wait_until(lambda: not any(map(running, pids)), self._config.timeout.shutdown)
            self._deaths.forget(roles)
            self._logs.mark()
            for role in roles:
                self.server.dismiss(role, "its role is started again")
            with self._failure_lock:
                self.failure, now, nodes = None, time.monotonic(), _nodes_of(ranks)
                for role, unit in self.units.items():
                    if role in roles:
                        ended = unit if unit.state == "lost" else unit.lost("its role is started again", now)
                        self.units[role] = ended.again(now, *nodes[role])
            for role in self._ranks.roles:
                self.server.revive(role)

    def _handle(self, role: str) -> RoleHandle[Any]:
        world, timeout = self._ranks.world(role), self._config.timeout
        if any(share.engines for share in self._ranks.roles[role]):
            return EngineHandle(self.server, role, world, self._config.vllm.tensor_parallel_size, timeout)
        return RoleHandle(self.server, role, world, timeout, lambda: ROLES[role].layout(self._config))

    def _over(self) -> bool:
        return self.failure is not None or self._leaving.is_set()

    @property
    def failed_role(self) -> Unit | None:
        """Return the role whose failure broke the run; None: no role's did."""
        return next((unit for unit in self.units.values() if unit.gone), None)

    def here(self, role: str) -> set[int]:
        """List the ranks of `role` that have said hello and are not lost."""
        return {peer.rank for peer in self.server.peers(role) if not peer.lost}

    def fail(self, error: Exception, lost: Unit | None = None) -> None:
        """Break the run by an error that does not come from a call: every pending and every later call raises it.

        `lost`: role that failed, in its new state.
        """
        with self._failure_lock:
            if self.failure is None:
                self.failure = error
                if lost is not None:
                    self.units[lost.role] = lost
        for name in self._ranks.roles:
            self.server.fail_role(name, self.failure)

    def look(self, pids: Mapping[str, Sequence[int]], within_s: float) -> list[NodeView]:
        """Return what each node knows of its processes, as `AgentServer.look` does."""
        return self._launcher.agents.look(pids, within_s)

    @property
    def sync_host(self) -> str:
        """Name the node where the members of a weight transfer meet: that of the rank that sends."""
        return LOOPBACK if self._launcher.address == LOOPBACK else self._ranks.roles["actor"][0].node

    def blame(self, error: RunError) -> None:
        """Raise the error that really broke the run, if that is not `error`.

        When a rank ends, its calls fail, other ranks report it, and its launcher sees it. Only the launcher knows who
        was first, and the last lines of its log. When a node dies, the collectives of other ranks fail within a second,
        and only missing heartbeats tell which node it was. So this waits while a rank is silent; half of
        `timeout.heartbeat` of silence, together with `error`, is evidence enough.
        """
        if not (isinstance(error, RemoteError) and error.user_error):
            begin, longest_s = time.monotonic(), self._config.timeout.heartbeat + self._silence.patience_s
            wait_until(lambda: self._explained(error, time.monotonic() - begin), longest_s, 0.05)
        if self.failure is not None and self.failure is not error:
            raise self.failure from error

    def _explained(self, error: RunError, waited_s: float) -> bool:
        """Tell whether it is known why the run broke, or nothing more will be known after `waited_s`."""
        if self.failure is not None or self._deaths.ends:
            return self.failure is not None  # `_judge` in the watching thread decides
        silent = self._silence.ranks()
        self._give_up(silent, str(error))
        return not silent and waited_s > self._silence.patience_s

    def stop(self) -> None:
        """End every process: ask, then end by force what is left, within `timeout.shutdown` seconds each."""
        self._leaving.set()
        if self.engines is not None:
            self.engines.close()
        self._launcher.stop(self._all_ended(), self._config.timeout.shutdown / 2)
        self._gone.set()
        self.server.close()
        log.info("control port: %s", self.server.counts())
        self._directory.keys.unlink(missing_ok=True)

    def _all_ended(self) -> bool:
        """Ask every rank to end; True when all of them have released what they hold."""
        if self.failure is not None:
            return False
        here = [(handle, rank) for role, handle in self.roles.items() for rank in self.here(role)]
        calls = [handle.ask(rank, RankCalls.shutdown) for handle, rank in here]
        done, late = wait(calls, self._config.timeout.shutdown / 2)
        return not late and all(call.exception() is None for call in done)

    def _watch(self) -> None:
        # Until all is over: a launcher may start a process from this thread, and the process ends with the thread.
        while not self._gone.wait(POLL_S):
            try:
                with self._looking:
                    self._look_around()
            except OSError as error:  # the disk may answer when the next look asks it
                log.info("a look at the processes is repeated: %s", error)

    def _look_around(self) -> None:
        self._watch_engines()
        now, known = self.server.now, self._known()
        self._deaths.note(self._launcher.ended(), known, now)
        if self.failure is None and not self._leaving.is_set():
            if self._deaths.ends:
                self._judge(self._deaths.waited_s(now), known)
            else:
                self._watch_lost_nodes()

    def _known(self) -> list[RoleRanks]:
        """Return what is known of the ranks of each role whose end `Launcher.ended` reports."""
        here, engines = self._launcher.address == LOOPBACK, self._launcher.engines is not None
        roles = [role for role, handle in self.roles.items() if not (engines and isinstance(handle, EngineHandle))]
        return [RoleRanks(role, self._ranks.world(role), self.server.peers(role), here) for role in roles]

    def _watch_lost_nodes(self) -> None:
        """Give up a role that starts where a node has died: nobody misses the heartbeats of ranks before their hello.

        Agents of the role, which may replace one that has died, get the same time to appear.
        """
        limit_s = self._config.timeout.heartbeat
        for role, unit in self.units.items():
            starting = unit.state == "starting" and ROLES[role].kind != "engine"
            if starting and time.monotonic() - unit.began > limit_s:
                self._lose_before_hello(role, limit_s, f"nothing was heard of the node for {limit_s:g} s")

    def _watch_engines(self) -> None:
        if (engines := self.engines) is None:
            return
        launcher = self._launcher.engines
        for engine, how in self._engine_ends.news(launcher.ended() if launcher else ()):
            node, ranks = engines.node(engine), [g.ranks for g in self._ranks.tp_groups if g.engine == engine]
            logs = self._logs.of_ranks(ROLLOUT, node, ranks[0])
            # The log of an engine that ends while it starts says why.
            why = f"{how}.\n{self._logs.quote(logs)}" if engine not in engines.up else how
            if not self._leaving.is_set() and not self._goes_on_without(engine, why):
                self._fail(ROLLOUT, (node,), how, logs)
        engines.look()

    def _goes_on_without(self, engine: int, why: str, silent: bool = False) -> bool:
        return self.engines is not None and self.engines.lost(engine, why, silent=silent)

    def _judge(self, waited_s: float, known: list[RoleRanks]) -> None:
        """Name the process groups that ended by themselves, in their order, unless a dead node is the cause.

        NCCL ends the processes whose peers are gone, and srun reports these ends, and nothing of the dead node.
        """
        end = self._deaths.ends[0]
        if self._launcher.address == LOOPBACK:
            if self._deaths.more_to_come(waited_s, known, self._silence.patience_s, self._silence.enough_s):
                return
        elif not self._deaths.sure:
            # Ranks on nodes where every rank is silent, and of which the launcher has no end to report.
            heard = self._silence.heard_nodes().union(*(names_in(end.node) for end in self._deaths.ends))
            dead = [peer for peer in self._silence.ranks() if peer.host not in heard]
            self._give_up(dead, f"{end.role} on {end.node} {end.how}")
            if dead or waited_s < self._silence.patience_s:
                return
        end, what = self._deaths.verdict(known, self._named)
        self._fail(end.role, names_in(end.node), what, self._logs.of_end(end))

    def silent_nodes(self) -> set[str]:
        """List the nodes of which no rank is heard any more, or ever was."""
        dead = self.failed_role.nodes if self.failed_role is not None and self.failed_role.silent else ()
        return self._silence.nodes(dead)

    def _give_up(self, suspects: list[Peer], evidence: str) -> None:
        """Give up silent ranks: there is `evidence` that something broke."""
        for peer in self._silence.ranks(self._silence.enough_s):
            if peer in suspects:
                peer.silent = True
                heard = f"it was not heard from for {self._silence.enough_s:g} s, last phase {peer.phase!r}"
                self._lose(peer, f"{heard}, and {evidence}")

    def _on_lost(self, peer: Peer) -> None:
        if peer in self.server.peers(peer.role):  # not one of a start before
            self._lose(peer, peer.lost)

    def _lose(self, peer: Peer, why: str) -> None:
        what = f"{self._named(peer)} on {peer.host} (pid {peer.pid}) is lost: {why}"
        if (engine := self._engine_of(peer)) is not None and self._goes_on_without(engine, what, silent=True):
            return
        if not self._leaving.is_set():
            logs = [self._directory.role_log(peer.role, peer.host, peer.rank)]
            self._fail(peer.role, (peer.host,), what, logs, silent=True, hang=peer.silent)

    def _on_event(self, peer: Peer, event: str, data: dict[str, Any]) -> None:
        """Act on the event of a rank: it cannot go on, or it got SIGTERM."""
        if event == FAILURE and (engine := self._engine_of(peer)) is not None:
            self._engine_ends.said(engine, str(data.get("reason")))
        if event == TERMINATION and not self._leaving.is_set():
            ranks, alone = self.server.peers(peer.role), len(self.roles) == 1
            if alone:  # engines, of which some may be lost
                ranks = [each for each in ranks if not each.lost]
            self._preemption.note(peer, ranks, len(ranks) if alone else peer.world)

    def _engine_of(self, peer: Peer) -> int | None:
        handle = self.roles[peer.role]
        return peer.rank // handle.width if isinstance(handle, EngineHandle) else None

    def _named(self, peer: Peer) -> str:
        engine = self._engine_of(peer)
        return f"rank {peer.rank}" if engine is None else f"rank {peer.rank} of engine {engine}"

    def _fail(
        self,
        role: str,
        nodes: Collection[str],
        what: str,
        logs: Sequence[Path],
        silent: bool = False,
        hang: bool = False,
    ) -> None:
        """Break the run: `what` happened to a role, on one of `nodes`, as the newest of `logs` may explain."""
        if self.failure is None:
            away = conductor_stood_still(self.server.clock.absence_s, self._config.timeout)
            message = away or f"role {role} died: {what}"
            error = RoleDied(f"{message}.\n{self._logs.quote(logs)}", hang=hang)
            log.error("%s", error)
            unit = self.units[role]
            lost = unit if unit.gone else unit.lost(what, time.monotonic(), silent)
            self.fail(error, replace(lost, nodes=tuple(nodes)))


def _nodes_of(ranks: RankMap) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each role."""
    return {role: tuple(share.node for share in shares) for role, shares in ranks.roles.items()}
