"""Starts engines again that die while a run goes on, on their node or on a spare one, once the old processes are gone.

The users of a lost engine go on without it: `Dispatcher` and `GroupStream` hand its unfinished prompts to the others,
`EnginePool` forms the weight transfer group anew. An engine that was started again joins like one that starts late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Timeout
from slurm_rlhf.errors import PlacementError, RemoteError, RoleDied
from slurm_rlhf.nodes.engine_launcher import EngineLauncher
from slurm_rlhf.observe.run_log import ENGINE_JOINED, ENGINE_LOST
from slurm_rlhf.placement.replacement import passed_over
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.handles import ControlServer, EngineHandle
from slurm_rlhf.wire.messages import Peer

log = logging.getLogger(__name__)

INCIDENT_S = 60.0
"""Engines of a node that are lost within this time are one loss of the node."""
_BROKEN = (": OutOfMemoryError: ", "CUDA error")
"""Words in the error of an engine whose process lives, but cannot work any more."""

Status = Literal["up", "lost", "ending", "out"]
Tell = Callable[[str, str, int], None]
"""Gets the text, the kind of the event, and the engine."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Says that an engine was lost on a node, at `at` seconds of some clock."""

    engine: int
    node: str
    at: float


@dataclass(frozen=True, slots=True)
class RestartPlace:
    """Says where an engine starts again; `node` None: nowhere, for the reason `why`."""

    node: str | None
    why: str = ""


def next_place(
    engine: int,
    home: str,
    losses: Sequence[Loss],
    spares: Collection[str],
    home_gone: bool,
    most: int,
    unfit: Mapping[str, str] | None = None,
) -> RestartPlace:
    """Choose where `engine`, which has just been lost on `home`, starts again.

    `losses`: all losses of the run so far, in their order. `spares`: nodes without ranks. `home_gone`: nothing is
    heard from that node. `most`: train.max_engine_restarts, the starts that an engine gets after its first; a node that
    was lost more often gets no further engine. `unfit`: spares that get none either, and why.
    """
    died = sum(loss.engine == engine for loss in losses)
    if died > most:
        return RestartPlace(None, f"it died {died} times (train.max_engine_restarts = {most})")
    bad = {node for node in {loss.node for loss in losses} if incidents(losses, node) > most}
    good = [node for node in spares if node not in {*bad, *(unfit or {})}]
    if home not in bad and not (home_gone and good):
        return RestartPlace(home)
    if good:
        return RestartPlace(good[0])
    why = f"its node {home} lost engines {incidents(losses, home)} times (train.max_engine_restarts = {most})"
    passed = {node: said for node, said in (unfit or {}).items() if node in spares}
    return RestartPlace(None, f"{why}; {passed_over(passed)}" if passed else why)


def incidents(losses: Sequence[Loss], node: str) -> int:
    """Count how often a node lost engines; several within a minute are one time."""
    count, last = 0, -INCIDENT_S
    for loss in losses:
        if loss.node == node:
            count += loss.at - last >= INCIDENT_S or count == 0
            last = loss.at
    return count


@dataclass(frozen=True, slots=True)
class EngineState:
    """Describes an engine: up (or starting), lost, being ended, or left out for good."""

    node: str
    status: Status = "up"
    life: int = 0  # number of starts after the first
    began: float = 0.0  # time of the present start
    lost_at: float = 0.0
    why: str = ""  # reason why it is lost or left out
    silent: bool = False  # True: it is lost because nothing was heard of it


class EngineRecovery:
    """Knows which engines are up. Only the supervisor's thread calls `look`; any thread may call the rest.

    Until `arm` is called, an engine that dies ends the run: engines that cannot start at all end it at once.
    """

    def __init__(
        self,
        handle: EngineHandle,
        server: ControlServer,
        launcher: EngineLauncher,
        homes: Mapping[int, str],
        timeout: Timeout,
        most: int,
        fail: Callable[[Exception], None],
        failed: Callable[[], bool],
    ) -> None:
        """`homes`: engine -> node. `most`: train.max_engine_restarts. `fail` ends the run; `failed`: it ends."""
        self._handle = handle
        self._server = server
        self._launcher = launcher
        self._timeout = timeout
        self._most = most
        self._fail = fail
        self._failed = failed
        self._states = {engine: EngineState(node) for engine, node in homes.items()}
        self._losses: list[Loss] = []
        self._left_out: set[str] = set()  # nodes that the run has given up
        self._lock = threading.RLock()
        self._armed = False
        self.tell: Tell = lambda text, kind, engine: log.warning("%s", text)
        """Reports to the user that an engine is lost, left out or back."""
        self.renew(handle)

    def renew(self, handle: EngineHandle) -> None:
        """Go on with another handle of the same engines, because their trainers have started again."""
        self._handle = handle
        handle.goes_on_without = self.goes_on_without
        handle.give_up = self.lost

    def leave_out(self, places: Mapping[int, str], nodes: Collection[str]) -> None:
        """Start no engine on `nodes` again; those that were there, which are lost, start at `places[engine]`."""
        self._left_out = set(nodes)
        for engine, node in places.items():
            if self.node(engine) in nodes:
                self._put(engine, node=node, silent=False)

    @property
    def armed(self) -> bool:
        """Tell whether the run goes on when an engine dies."""
        return self._armed and not self._failed()

    def arm(self) -> None:
        """Go on without engines that die from now on, because one has started."""
        self._armed = True

    def life(self, engine: int) -> int | None:
        """Return the number of the start by which an engine is up or starting, 0 for the first; None: it is neither."""
        state = self._states[engine]
        return state.life if state.status == "up" else None

    def node(self, engine: int) -> str:
        """Return where an engine is, or was."""
        return self._states[engine].node

    @property
    def deserted(self) -> set[str]:
        """List the nodes that engines were lost on and have left: nothing should start there."""
        return {loss.node for loss in self._losses if self._states[loss.engine].node != loss.node}

    @property
    def without_engines(self) -> bool:
        """Tell whether the run waits because all engines were lost, which is no hang."""
        return bool(self._losses) and not self._handle.ready

    @property
    def left(self) -> int:
        """Count the engines that are not left out."""
        return sum(state.status != "out" for state in self._states.values())

    def goes_on_without(self, engine: int, error: BaseException) -> bool:
        """Tell whether the run goes on without an engine whose call has failed by `error`."""
        broken = isinstance(error, RemoteError) and ": EngineBroken: " in str(error)  # its end is reported later
        if not self.armed:
            return broken
        if broken or isinstance(error, RoleDied):
            # The end of its processes is reported later; until then nobody should call the engine again.
            if broken or self._peers_lost(engine):
                self._handle.ready = [other for other in self._handle.ready if other != engine]
            return True
        if isinstance(error, RemoteError) and any(words in str(error) for words in _BROKEN):
            return self.lost(engine, str(error))
        return False

    def lost(self, engine: int, why: str, life: int | None = None, silent: bool = False) -> bool:
        """Count an engine as lost, unless it is lost already or has started again; False: the run ends instead.

        `silent`: nothing was heard of it, so that its node may be gone.
        """
        if not self.armed:
            return False
        with self._lock:
            state, now = self._states[engine], time.monotonic()
            if state.status != "up" or (life is not None and life != state.life):
                return True
            self._states[engine] = replace(state, status="lost", lost_at=now, why=why, silent=silent)
            self._losses.append(Loss(engine, state.node, now))
            self._handle.ready = [other for other in self._handle.ready if other != engine]
            others = len(self._handle.ready)
        for rank in self._ranks(engine):
            self._server.give_up(ROLLOUT, rank, why)
        self.tell(
            f"engine {engine} on {state.node} is lost: {why}. "
            f"{others} of {len(self._states)} engines go on, with its unfinished prompts",
            ENGINE_LOST,
            engine,
        )
        return True

    def joined(self, engine: int, version: int) -> None:
        """Note that an engine takes part from policy `version` on."""
        state = self._states[engine]
        if state.life:
            seconds = time.monotonic() - state.lost_at
            self.tell(
                f"engine {engine} on {state.node} takes part again from policy version {version} on, "
                f"{seconds:.1f} s after it was lost",
                ENGINE_JOINED,
                engine,
            )

    def look(self) -> None:
        """End what is left of lost engines, and start them again. The new processes end with this thread."""
        for engine, state in list(self._states.items()):
            match state.status:
                case "lost":
                    self._launcher.end(engine)
                    self._put(engine, status="ending")
                case "ending" if self._is_over(engine, state):
                    self._start_again(engine)
                case "up" if state.life and time.monotonic() - state.began > self._timeout.connect:
                    if not self._here(engine):
                        self.lost(engine, f"it did not say hello within {self._timeout.connect:g} s (timeout.connect)")

    def close(self) -> None:
        """End engines that are starting: the run ends, and would have to wait for them."""
        for engine, state in list(self._states.items()):
            if state.status in ("lost", "ending") or (state.life and not self._here(engine)):
                self._launcher.end(engine)

    def _is_over(self, engine: int, state: EngineState) -> bool:
        gone = self._launcher.gone(engine) or time.monotonic() - state.lost_at > timeouts.ENGINE_GONE_S
        return gone and self._peers_lost(engine)

    def _start_again(self, engine: int) -> None:
        state = self._states[engine]
        spares = [node for node in self._launcher.spares if node not in self._left_out]
        unfit = self._launcher.unfit
        place = next_place(engine, state.node, self._losses, spares, self._node_gone(state), self._most, unfit)
        if place.node is None:
            self._leave_out(engine, place.why)
            return
        try:
            self._launcher.start_again(engine, place.node)
        except (PlacementError, OSError) as error:
            self._leave_out(engine, f"it cannot start on {place.node}: {error}")
            return
        log.info("engine %d is started again on %s", engine, place.node)
        self._put(engine, status="up", node=place.node, life=state.life + 1, began=time.monotonic())

    def _leave_out(self, engine: int, why: str) -> None:
        state = self._states[engine]
        self._put(engine, status="out", why=why)
        words = f"engine {engine} on {state.node} is left out: {why}; {self.left} of {len(self._states)} are left"
        self.tell(words, ENGINE_LOST, engine)
        if not self.left:
            self._fail(
                RoleDied(
                    f"no engine is left: the last one, engine {engine} on {state.node}, died: {state.why}. "
                    f"It is not started again: {why}."
                )
            )

    def _put(self, engine: int, **changes: object) -> None:
        with self._lock:
            self._states[engine] = replace(self._states[engine], **changes)  # type: ignore[arg-type]

    def _ranks(self, engine: int) -> range:
        return range(engine * self._handle.width, (engine + 1) * self._handle.width)

    def _peers(self, engine: int) -> list[Peer]:
        return [peer for peer in self._server.peers(ROLLOUT) if peer.rank in self._ranks(engine)]

    def _peers_lost(self, engine: int) -> bool:
        """Tell whether all processes of an engine are lost."""
        return all(peer.lost for peer in self._peers(engine))

    def _here(self, engine: int) -> bool:
        """Tell whether all ranks of an engine have said hello."""
        return {peer.rank for peer in self._peers(engine) if not peer.lost} == set(self._ranks(engine))

    def _node_gone(self, state: EngineState) -> bool:
        """Tell whether an engine is silent, and with it all processes of the run on its node."""
        silent = self._server.silent(self._timeout.heartbeat / 2)
        return state.silent and all(peer.lost or peer in silent for peer in self._server.peers_on(state.node))
