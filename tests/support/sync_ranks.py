"""A role whose ranks are processes of `sync_peer`, for the conductor's side of weight updates."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from sync_peer import Peer, digest, make_weights

from slurm_rlhf.config.schema import Config
from slurm_rlhf.controller.weight_updates import WeightSync
from slurm_rlhf.errors import RemoteError


class Ranks:
    """A role whose ranks are `sync_peer`s: what `RoleHandle` and `EngineHandle` are for the conductor."""

    width = 1  # ranks of an engine

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers
        self.world = len(peers)
        self._threads = [ThreadPoolExecutor(1) for _ in peers]  # calls of a rank come after each other

    def call(self, rank: int, method: str, /, **args: Any) -> Future[Any]:
        return self._threads[rank].submit(self._ask, self.peers[rank], method, args)

    def start_all(self, method: str, args_per_rank: Any = None, /, **shared: Any) -> list[Future[Any]]:
        own = args_per_rank or [{}] * self.world
        return [self.call(rank, method, **{**shared, **own[rank]}) for rank in range(self.world)]

    def _ask(self, peer: Peer, method: str, args: dict[str, Any]) -> Any:
        peer.tell(method, **args)
        answer = peer.answer()
        if isinstance(answer, dict) and "error" in answer:
            raise RemoteError(f"{method} failed: {answer['error']}: {answer['message']}")
        return answer


def configure(settings: dict[str, Any]) -> Config:
    config = Config()
    for name, value in settings.items():
        group, _, key = name.partition(".")
        setattr(getattr(config, group), key, value)
    return config


def loaded(weights: WeightSync, engine: int) -> dict[str, str]:
    return weights.rollout.call(engine, "weights_loaded").result()


def sent(version: int) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in make_weights(version)}
