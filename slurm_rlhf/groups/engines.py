"""Starts the engines of a run, each by itself, and starts those again that die, once their old processes are gone.

The users of a lost engine go on without it: `Scheduler` hands its unfinished requests to the others,
`EnginePool` forms the weight transfer group anew. An engine that was started again joins like one that starts late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any

from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, PlacementError, RemoteError, RoleDied
from slurm_rlhf.groups.restarts import Loss, Unit, next_place
from slurm_rlhf.nodes.agent_launcher import AgentEngines
from slurm_rlhf.observe.run_log import ENGINE_JOINED, ENGINE_LOST
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import EngineCalls
from slurm_rlhf.wire.handles import ControlServer, EngineHandle
from slurm_rlhf.wire.messages import Peer

log = logging.getLogger(__name__)

_UNABLE = (": OutOfMemoryError: ", "CUDA error")
"""Words in the error of an engine whose process lives, but cannot work any more."""

Tell = Callable[[str, str, int], None]
"""Gets the text, the kind of the event, and the engine."""


@dataclass(eq=False)
class Engines:
    """Knows in which state each engine is. Only the supervisor's thread calls `look`; any thread may call the rest.

    Until one has started, an engine that dies ends the run: engines that cannot start at all end it at once.
    """

    handle: InitVar[EngineHandle]
    server: ControlServer
    launcher: AgentEngines | None  # None: the run ends with the first engine that dies, as none starts again
    homes: InitVar[Mapping[int, str]]  # engine -> node
    config: Config
    fail: Callable[[Exception], None]  # ends the run
    over: Callable[[], bool]  # tells whether the run ends

    def __post_init__(self, handle: EngineHandle, homes: Mapping[int, str]) -> None:
        self._most = self.config.train.max_engine_restarts
        self._units = {engine: Unit(ROLLOUT, (node,)) for engine, node in homes.items()}
        self._losses: list[Loss] = []
        self._left_out: set[str] = set()  # nodes that the run has given up
        self._lock = threading.RLock()
        self._begun = False  # engines are asked to start
        self._late = False  # True: the user was warned of engines that have not started
        self._all_at_once = False
        self._apart = False  # True: the run goes on even if an engine dies while it starts, or the last one dies
        self._version: int | None = None  # version of the policy that each engine has from its start
        self._note: Callable[[str], None] = lambda text: None
        self._started_once = False
        self.refused: list[RemoteError] = []
        """User's errors for which engines did not start while others go on."""
        self.tell: Tell = lambda text, kind, engine: log.warning("%s", text)
        """Reports to the user that an engine is lost, left out or back."""
        self.renew(handle)

    def renew(self, handle: EngineHandle) -> None:
        """Go on with another handle of the same engines, because their trainers have started again."""
        self._handle = handle
        handle.goes_on_without = self.goes_on_without
        handle.give_up = self.lost
        for engine in self._units:
            self._put(engine, version=None)

    def begin(self, all_at_once: bool, note: Callable[[str], None]) -> None:
        """Ask each engine to start as soon as all of its ranks are there. One that fails to start ends the run.

        `all_at_once`: so does one whose ranks do not come. Otherwise `note` says so, and the run goes on.
        """
        self._all_at_once, self._note, self._late = all_at_once, note, False
        for engine, unit in self._units.items():
            if unit.state == "starting" and not unit.life:
                self._put(engine, began=time.monotonic())
        self._begun = True

    def begin_apart(self, version: int) -> None:
        """Do as `begin`, but no engine that does not start, or dies, ends the run, and none starts again.

        `version`: version of the policy that all of them have.
        """
        self._apart, self._version, self._started_once, self._most = True, version, True, 0
        self.begin(False, self._note)

    def pause(self) -> None:
        """Start no engine until `begin` is called once more: the trainers end."""
        self._begun = False

    def leave_out(self, places: Mapping[int, str], nodes: Collection[str]) -> None:
        """Start no engine on `nodes` again; those that were there, which are lost, start at `places[engine]`."""
        self._left_out = set(nodes)
        for engine, node in places.items():
            if self.node(engine) in nodes:
                self._put(engine, nodes=(node,), silent=False)

    @property
    def alone(self) -> bool:
        """Tell whether each engine can be started again by itself."""
        return self.launcher is not None

    @property
    def armed(self) -> bool:
        """Tell whether the run goes on when an engine dies."""
        return self.alone and self._started_once and not self.over()

    @property
    def up(self) -> dict[int, int]:
        """Return the engines that have started, and the life of each: how often it was started again."""
        return {engine: unit.life for engine, unit in sorted(self._units.items()) if unit.state == "up"}

    @property
    def asked(self) -> list[int]:
        """List the engines that were asked to start, and have not answered."""
        return [engine for engine, unit in self._units.items() if unit.state == "starting" and unit.asked]

    @property
    def left(self) -> int:
        """Count the engines that have not ended for good."""
        return sum(unit.state != "ended" for unit in self._units.values())

    def node(self, engine: int) -> str:
        """Return where an engine is, or was."""
        return self._units[engine].node

    def why(self, engine: int) -> str:
        """Say why an engine is lost; empty: it is not."""
        return self._units[engine].why

    @property
    def deserted(self) -> set[str]:
        """List the nodes that engines were lost on and have left: nothing should start there."""
        return {loss.node for loss in self._losses if self.node(loss.engine) != loss.node}

    @property
    def all_lost(self) -> bool:
        """Tell whether the run waits because all engines were lost, which is no hang."""
        return bool(self._losses) and not self._handle.ready

    def goes_on_without(self, engine: int, error: BaseException) -> bool:
        """Tell whether the run goes on without an engine whose call has failed by `error`."""
        broken = isinstance(error, RemoteError) and ": EngineBroken: " in str(error)  # its end is reported later
        if not self.armed:
            return broken and self.alone
        if broken or isinstance(error, RoleDied):
            # The end of its processes is reported later; until then nobody should call the engine again.
            if broken or self._peers_lost(engine):
                self._put(engine, version=None)
            return True
        if isinstance(error, RemoteError) and any(words in str(error) for words in _UNABLE):
            return self.lost(engine, str(error))
        return False

    def lost(self, engine: int, why: str, silent: bool = False) -> bool:
        """Count an engine as lost, unless it is lost already; False: the run ends instead.

        `silent`: nothing was heard of it, so that its node may be gone.
        """
        if not self.armed:
            return False
        with self._lock:
            unit, now = self._units[engine], time.monotonic()
            if unit.gone:
                return True
            self._losses.append(Loss(engine, unit.node, now))
            self._set(engine, unit.lost(why, now, silent))
            others = len(self._handle.ready)
        for rank in self._ranks(engine):
            self.server.give_up(ROLLOUT, rank, why)
        self.tell(
            f"engine {engine} on {unit.node} is lost: {why}. "
            f"{others} of {len(self._units)} engines go on, with its unfinished prompts",
            ENGINE_LOST,
            engine,
        )
        return True

    def take_part(self, engines: Collection[int], version: int) -> None:
        """Note that engines have the weights of policy `version`, so that they get prompts; others get none."""
        with self._lock:
            before = dict(self._units)
            for engine, unit in before.items():
                self._put(engine, version=version if unit.state == "up" and engine in engines else None)
            new = [engine for engine in self._handle.ready if before[engine].version is None]
        for engine in new:
            log.info("engine %d takes part from policy version %d on", engine, version)
            if (unit := before[engine]).life:
                text = f"engine {engine} on {unit.node} takes part again from policy version {version} on, "
                self.tell(f"{text}{time.monotonic() - unit.lost_at:.1f} s after it was lost", ENGINE_JOINED, engine)

    def look(self) -> None:
        """Ask engines to start whose ranks are there, end what is left of lost ones, and start those again.

        The new processes end with this thread.
        """
        begun, launcher = self._begun and not self.over(), self.launcher
        for engine, unit in list(self._units.items()):
            if unit.state == "starting" and not unit.asked and begun:
                self._ask(engine)
            elif unit.state == "lost" and launcher is not None and self.armed:
                if not unit.asked:
                    launcher.end(engine)
                    self._put(engine, asked=True)
                elif self._is_over(engine, unit, launcher):
                    self._start_again(engine, unit, launcher)
        if begun:
            self._watch_late()

    def close(self) -> None:
        """End engines that are starting: the run ends, and would have to wait for them."""
        for engine, unit in list(self._units.items()):
            if self.launcher is None:
                return
            if unit.state == "lost" or (unit.state == "starting" and (self._apart or not self._here(engine))):
                self.launcher.end(engine)
                for rank in self._ranks(engine):
                    self.server.give_up(ROLLOUT, rank, "the run ends before its engine has started")

    def _ask(self, engine: int) -> None:
        with self._lock:
            unit = self._units[engine]
            if unit.state != "starting" or not self._here(engine):
                return
            self._put(engine, asked=True)
        call = self._handle.call(engine, EngineCalls.start, 0)
        call.add_done_callback(partial(self._answered, engine, unit.life))

    def _answered(self, engine: int, life: int, call: Future[Any]) -> None:
        error = call.exception()
        with self._lock:
            unit = self._units[engine]
            if (unit.state, unit.life) != ("starting", life):
                return
            if error is None:
                log.info("engine %d has started", engine)
                if not self._started_once and call.result().note:
                    self._note(call.result().note)
                self._started_once = True
                self._set(engine, unit.up(self._version))
                return
        if not self._begun or self.goes_on_without(engine, error):
            return  # it is started again
        if isinstance(error, RemoteError) and error.user_error:
            self.refused.append(error)
        if (life or self._apart) and self.lost(engine, f"it did not start: {error}"):
            log.error("engine %d: %s", engine, getattr(error, "remote_traceback", ""))
        elif isinstance(error, Exception):
            self.fail(error)

    def _watch_late(self) -> None:
        """Give up engines that have not said hello in time; those of the first start may still come, if others have."""
        end = time.monotonic() - self.config.timeout.connect
        late = [e for e, u in self._units.items() if u.state == "starting" and not u.asked and u.began < end]
        first = [engine for engine in late if not (self._units[engine].life or self._apart)]
        limit = f"within {self.config.timeout.connect:g} s (timeout.connect)"
        for engine in set(late) - set(first):
            self.lost(engine, f"it did not say hello {limit}")
        if not first or self._late:
            return
        self._late, engine = True, min(first)
        here = [peer.rank for peer in self._peers(engine) if not peer.lost]
        missing = ", ".join(str(rank) for rank in self._ranks(engine) if rank not in here)
        what = (
            f"engine {engine}: {ROLLOUT} rank {missing} did not say hello {limit}; engines without all of their "
            f"ranks: {len(first)}. Their log files say why"
        )
        if self._all_at_once or len(first) == len(self._units):
            self.fail(CallTimeout(what))
        else:
            self._note(f"warning: {what}. The run goes on without them, and takes them in when they come")

    def _is_over(self, engine: int, unit: Unit, launcher: AgentEngines) -> bool:
        gone = launcher.gone(engine) or time.monotonic() - unit.lost_at > timeouts.ENGINE_GONE_S
        return gone and self._peers_lost(engine)

    def _start_again(self, engine: int, unit: Unit, launcher: AgentEngines) -> None:
        spares = [node for node in launcher.spares if node not in self._left_out]
        silent = self.server.silent(self.config.timeout.heartbeat / 2)
        # The node counts as gone if the engine is silent, and with it all processes of the run on the node.
        gone = unit.silent and all(peer.lost or peer in silent for peer in self.server.peers_on(unit.node))
        try:
            node = next_place(engine, unit.node, self._losses, spares, gone, self._most, launcher.unfit)
            launcher.start_again(engine, node)
        except (PlacementError, OSError) as error:
            self._end(engine, unit, str(error))
            return
        log.info("engine %d is started again on %s", engine, node)
        self._set(engine, unit.again(time.monotonic(), node))

    def _end(self, engine: int, unit: Unit, why: str) -> None:
        self._set(engine, unit.ended(f"{unit.why}. It is not started again: {why}"))
        words = f"engine {engine} on {unit.node} is left out: {why}; {self.left} of {len(self._units)} are left"
        self.tell(words, ENGINE_LOST, engine)
        if not self.left and not self._apart:
            last = self._units[engine]
            self.fail(RoleDied(f"no engine is left: the last one, engine {engine} on {unit.node}, died: {last.why}."))

    def _put(self, engine: int, **changes: Any) -> None:
        """Change what is known of an engine, except its state."""
        with self._lock:
            self._set(engine, replace(self._units[engine], **changes))

    def _set(self, engine: int, unit: Unit) -> None:
        with self._lock:
            self._units[engine] = unit
            self._handle.ready = [each for each, one in self._units.items() if one.version is not None]

    def _ranks(self, engine: int) -> range:
        return range(engine * self._handle.width, (engine + 1) * self._handle.width)

    def _peers(self, engine: int) -> list[Peer]:
        return [peer for peer in self.server.peers(ROLLOUT) if peer.rank in self._ranks(engine)]

    def _peers_lost(self, engine: int) -> bool:
        """Tell whether all processes of an engine are lost."""
        return all(peer.lost for peer in self._peers(engine))

    def _here(self, engine: int) -> bool:
        """Tell whether all ranks of an engine have said hello."""
        return {peer.rank for peer in self._peers(engine) if not peer.lost} == set(self._ranks(engine))
