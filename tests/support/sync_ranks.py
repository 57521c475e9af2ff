"""A role whose ranks are processes of `sync_peer`, for the conductor's side of weight updates."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from sync_peer import Peer, digest, make_weights

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.call_spec import spec_of
from slurm_rlhf.controller.weight_updates import WeightSync
from slurm_rlhf.errors import RemoteError


class Ranks:
    """A role whose ranks are `sync_peer`s: what `RoleHandle` and `EngineHandle` are for the conductor."""

    width = 1  # ranks of an engine

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers
        self.world = len(peers)
        self._threads = [ThreadPoolExecutor(1) for _ in peers]  # calls of a rank come after each other

    def tell(self, rank: int, command: str, /, **args: Any) -> Any:
        """Have a rank do something that is no call of its role."""
        return self._threads[rank].submit(self._ask, self.peers[rank], command, args).result()

    def call(self, rank: int, method: Any, argument: Any, /) -> Future[Any]:
        result = spec_of(method).result
        return self._threads[rank].submit(self._ask, self.peers[rank], method.__name__, _plain(argument), result)

    def start_all(self, method: Any, argument: Any, /) -> list[Future[Any]]:
        return [self.call(rank, method, argument) for rank in range(self.world)]

    def start_each(self, method: Any, arguments: Sequence[Any], /) -> list[Future[Any]]:
        return [self.call(rank, method, argument) for rank, argument in enumerate(arguments)]

    def _ask(self, peer: Peer, method: str, args: dict[str, Any], result: Any = None) -> Any:
        peer.tell(method, **args)
        answer = peer.answer()
        if isinstance(answer, dict) and "error" in answer:
            raise RemoteError(f"{method} failed: {answer['error']}: {answer['message']}")
        return result(**answer) if result else answer


def _plain(argument: Any) -> dict[str, Any]:
    """List the fields that say something, as `weight_sync.endpoints` takes them."""
    return {name: value for name, value in asdict(argument).items() if value is not None}


def configure(settings: dict[str, Any]) -> Config:
    config = Config()
    for name, value in settings.items():
        group, _, key = name.partition(".")
        setattr(getattr(config, group), key, value)
    return config


def loaded(weights: WeightSync, engine: int) -> dict[str, str]:
    return weights.rollout.tell(engine, "weights_loaded")


def sent(version: int) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in make_weights(version)}
