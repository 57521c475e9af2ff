"""Says in which state a unit is: a role, or one of its engines. Pure.

A unit is `starting`, then `up`; or it is `lost`, and starts again or has `ended` for good. Whoever loses it says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

State = Literal["starting", "up", "lost", "ended"]

_NEXT: dict[State, tuple[State, ...]] = {
    "starting": ("up", "lost"),
    "up": ("lost",),
    "lost": ("starting", "ended"),
    "ended": (),
}


@dataclass(frozen=True, slots=True)
class Unit:
    """Describes a role, or one of its engines."""

    role: str
    nodes: tuple[str, ...] = ()  # where its processes are, or may have failed; empty: not known
    state: State = "starting"
    life: int = 0  # number of starts after the first: what an earlier life has left to say does not count
    began: float = 0.0  # time of the present start
    asked: bool = False  # its processes were asked to load the model, or told to end if it is lost
    version: int | None = None  # version of the policy from which it takes part; None: it gets no prompts
    lost_at: float = 0.0
    why: str = ""  # reason why it is lost, or has ended
    silent: bool = False  # True: it is lost because nothing was heard of it, so that its node may be gone

    @property
    def node(self) -> str:
        """Return where an engine is, or was: on one node."""
        return self.nodes[0]

    @property
    def gone(self) -> bool:
        """Tell whether it is lost, and may have ended for good."""
        return self.state in ("lost", "ended")

    def up(self, version: int | None = None) -> Unit:
        """Return the unit whose processes all have started."""
        return self._to("up", version=version)

    def lost(self, why: str, now: float, silent: bool = False) -> Unit:
        """Return the unit that lost a process; what is left of it is still to be ended."""
        return self._to("lost", why=why, lost_at=now, silent=silent, version=None, asked=False)

    def again(self, now: float, *nodes: str) -> Unit:
        """Return the unit whose processes were started once more."""
        return self._to("starting", nodes=nodes, life=self.life + 1, began=now, asked=False)

    def ended(self, why: str) -> Unit:
        """Return the unit that is left out for good."""
        return self._to("ended", why=why)

    def _to(self, state: State, **changes: Any) -> Unit:
        if state not in _NEXT[self.state]:
            raise ValueError(f"{self.role} on {', '.join(self.nodes)} cannot be {state}: it is {self.state}")
        return replace(self, state=state, **changes)
