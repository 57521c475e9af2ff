"""How a rank joins a group, and what it says of itself there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Membership:
    """How a rank joins a group; the same on all members but for `rank`, `label` and `node`."""

    name: str
    rank: int  # the actor's ranks count first
    world: int
    actors: int  # how many of `world` are the actor's
    host: str  # of the store
    port: int
    timeout_s: float
    backend: str = "auto"
    interface: str = ""  # or several with commas: each rank takes one; empty: the one that reaches the store
    label: str = ""  # how messages name the rank
    node: str = ""  # ranks of one node share it; empty: the host name
    directory: str = ""  # that all members see, for the disk backend
    colocated: bool = False  # actor and engines share their slots
    whole: bool = False  # each of the actor's ranks holds the whole model
    silence_s: float = 15.0  # a member that is not heard for so long during an update has broken it


@dataclass(frozen=True, slots=True)
class Member:
    """What a rank tells the others about itself."""

    rank: int
    label: str
    node: str
    host: str  # its name for itself
    pid: int
    address: str  # that the others connect to
    interface: str
    backend: str  # wanted
    device: str  # its GPU; empty without one
    port: int = 0  # at which the others may try whether they can reach it
    pulse: int = 0  # port for its peers' signs of life

    def __str__(self) -> str:
        return f"{self.label} on {self.node} (pid {self.pid})"

    @property
    def end(self) -> str:
        """The member as an end of a link."""
        return f"{self.label} on {self.node} ({self.interface}, {self.address})"
