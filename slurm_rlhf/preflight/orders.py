"""What the conductor asks of the agents: where it listens, what to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VARIABLE = "SLURM_RLHF_PREFLIGHT"
"""The environment variable of an agent; it holds a secret, so it is no argument, which other users could read."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Tell an agent what to do. `address` and `port` are those of the conductor's desk, `secret` proves who comes."""

    secret: str
    address: str
    port: int
    run_dir: str
    canary: str
    places: tuple[tuple[str, str], ...] = ()  # (key, path) that must be readable
    ports: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # node -> those that the run wants there
    gpus: bool = False  # look at them
    groups: bool = False  # get ready to start processes for the collectives
    connect_s: float = 5.0
    limit_s: float = 60.0  # an agent ends itself

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Orders:
        """Read what `to_environment` made. Raises KeyError without the variable."""
        data: dict[str, Any] = json.loads(environ[VARIABLE])
        data["places"] = tuple((key, path) for key, path in data["places"])
        data["ports"] = {node: tuple(ports) for node, ports in data["ports"].items()}
        return cls(**data)
