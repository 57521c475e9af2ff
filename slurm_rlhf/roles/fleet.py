"""Every process of a run: started, watched, and ended together."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from concurrent.futures import wait
from pathlib import Path

from slurm_rlhf.cluster.launcher import Ended, Launcher
from slurm_rlhf.cluster.placement import RankMap
from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.handles import RoleHandle
from slurm_rlhf.control.keys import RunKeys
from slurm_rlhf.control.peers import Peer
from slurm_rlhf.control.server import ControlServer
from slurm_rlhf.errors import RoleDied
from slurm_rlhf.observe.tail import tail
from slurm_rlhf.roles.run_directory import RunDirectory

log = logging.getLogger(__name__)

POLL_S = 0.25


class Fleet:
    """Starts one process group per role and notices within seconds when one of them is gone.

    The first failure fails every pending call of every role, so that whatever the conductor waits for, it learns of
    it; what other roles report afterwards, because a peer of theirs vanished, does not hide it.
    """

    def __init__(self, config: Config, directory: RunDirectory, ranks: RankMap, launcher: Launcher) -> None:
        self._config = config
        self._directory = directory
        self._ranks = ranks
        self._launcher = launcher
        self.server = ControlServer(
            RunKeys.create(directory.keys),
            heartbeat_interval=config.timeout.heartbeat_interval,
            heartbeat_limit=config.timeout.heartbeat,
            on_lost=self._lost,
        )
        self._leaving = threading.Event()
        self._failed: RoleDied | None = None
        self._failure_lock = threading.Lock()
        self.roles: dict[str, RoleHandle] = {}

    def start(self, environment: dict[str, dict[str, str]]) -> None:
        """Start all roles, with the variables of `environment[role]`, and wait until each rank has said hello.

        Raises RoleDied naming the role that ended instead, CallTimeout naming the ranks that stayed silent.
        """
        for role in self._ranks.roles:
            arguments = [
                f"--role={role}",
                f"--run_dir={self._directory.root}",
                f"--endpoint={self.server.endpoint('127.0.0.1')}",
            ]
            world = self._ranks.world(role)
            self._launcher.start(role, world, arguments, environment[role])
            self.roles[role] = RoleHandle(self.server, role, world, self._config.timeout)
        threading.Thread(target=self._watch, name="fleet-watch", daemon=True).start()
        for role, handle in self.roles.items():
            self.server.wait_for(role, handle.world, self._config.timeout.connect)

    def stop(self) -> None:
        """End every process: ask, then SIGTERM, then SIGKILL, within `timeout.shutdown` seconds."""
        self._leaving.set()
        if not self._said_done():
            self._launcher.terminate()
            self._wait_gone(self._config.timeout.shutdown / 2)
        # Ranks that said "done" have closed all they held; taking torchrun down in style would only cost seconds.
        self._launcher.kill()
        self.server.close()
        self._directory.keys.unlink(missing_ok=True)

    def _said_done(self) -> bool:
        """Ask every rank to leave; True when all of them have closed what they hold."""
        if self._failed is not None:
            return False
        calls = [handle.call(rank, "shutdown") for handle in self.roles.values() for rank in range(handle.world)]
        done, late = wait(calls, self._config.timeout.shutdown / 2)
        return not late and all(call.exception() is None for call in done)

    def _wait_gone(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._launcher.running() and time.monotonic() < end:
            time.sleep(0.02)

    def _watch(self) -> None:
        while not self._leaving.wait(POLL_S):
            for end in self._launcher.ended():
                if not self._leaving.is_set():
                    self._fail(end.role, self._describe(end), end.log)

    def _lost(self, peer: Peer) -> None:
        what = f"rank {peer.rank} on {peer.host} (pid {peer.pid}) is lost: {peer.lost}; it was at: {peer.phase}"
        if not self._leaving.is_set():
            self._fail(peer.role, what, self._directory.role_log(peer.role, peer.host, peer.rank))

    def _describe(self, end: Ended) -> str:
        how = f"was killed by {signal.Signals(-end.code).name}" if end.code < 0 else f"ended with status {end.code}"
        gone = [p for p in self.server.peers(end.role) if p.host == end.node and not os.path.exists(f"/proc/{p.pid}")]
        ranks = ", ".join(f"rank {p.rank} (pid {p.pid})" for p in gone)
        return f"its process group on {end.node} {how}" + (f"; gone: {ranks}" if ranks else "")

    def _fail(self, role: str, what: str, launcher_log: Path) -> None:
        with self._failure_lock:
            if self._failed is not None:
                return
            logs = sorted(self._directory.logs.glob(f"{role}.*.[0-9]*.log")) or [launcher_log]
            newest = max(logs, key=lambda path: path.stat().st_mtime)
            words = "\n".join(f"    {line}" for line in tail(newest, 12))
            self._failed = RoleDied(
                f"role {role} died: {what}.\nThe last lines of {newest}:\n{words}\n"
                f"Earlier checkpoints are intact; the same command goes on from the newest."
            )
        log.error("%s", self._failed)
        for name in self._ranks.roles:
            self.server.fail_role(name, self._failed)
