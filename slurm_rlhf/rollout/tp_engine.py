"""An engine of several TP ranks. Each rank schedules and samples for itself, so all must be told the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch import distributed as dist

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.records import Sampling, Trajectory
from slurm_rlhf.rollout.engine_place import EnginePlace
from slurm_rlhf.rollout.request import GenerateRequest
from slurm_rlhf.rollout.tp_digest import Ledger
from slurm_rlhf.rollout.tp_group import engine_group, tp_executor
from slurm_rlhf.rollout.vllm_engine import VllmEngine

Command = list[Any]
"""[name, arguments]: what a follower does."""


class Followers(Protocol):
    """The leader's way to the other TP ranks of its engine. Once one of them has failed, all of it raises RunError."""

    def send(self, commands: list[Command]) -> None:
        """They do `commands` in this order, after all earlier ones. Does not wait for them."""

    def planned(self, batch: int, digest: bytes) -> None:
        """What this rank is about to run. Whoever is about to run something else stops the engine, without waiting."""

    def agree(self, digest: bytes, batch: int, timeout_s: float) -> None:
        """All ranks have this digest after everything sent. Raises RunError if not, and the engine is stopped."""

    def finish(self, timeout_s: float) -> list[Any]:
        """Each follower's answer to the last command sent, which must be one with an answer. Raises CallTimeout."""


class TpEngine(VllmEngine):
    """One TP rank. All ranks of an engine make theirs at the same time and call the same methods in the same order.

    Asynchronous scheduling keeps them in step: how many batches are in flight, and which one a step reads, depends on
    the calls alone and never on what the device has finished. A rank flushes inside calls that all ranks get.
    """

    def __init__(
        self,
        config: Config,
        place: EnginePlace,
        store: dist.Store,
        identity: str,
        report: Callable[[int, bytes], None],
    ) -> None:
        """`store`, `identity`: of the engine, on all ranks the same. `report` gets each batch's number and digest."""
        self.place = place
        self.ledger = Ledger()
        self._report = report
        self._executor = tp_executor(identity)
        with engine_group(place, store, config.timeout.collective):
            super().__init__(config, place.engine)
        self._llm.model_executor.before_batch = self._before_batch

    def add(self, request: GenerateRequest) -> None:
        super().add(request)
        self.ledger.added(request)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_weights(weights, version)
        self.ledger.loaded(version)

    def _executor_class(self) -> Any:
        return self._executor

    def _sampled(self, key: str, tokens: list[int]) -> None:
        self.ledger.sampled(key, tokens)

    def _before_batch(self, scheduled: Any) -> None:
        self._report(*self.ledger.planned(scheduled.num_scheduled_tokens))


class LeadingEngine(TpEngine):
    """TP rank 0: an `engine.Engine` that takes the other ranks along.

    No response leaves it before all ranks have confirmed its tokens.
    """

    def __init__(
        self, config: Config, place: EnginePlace, store: dist.Store, identity: str, followers: Followers
    ) -> None:
        """`followers` were told to start already."""
        self._followers = followers
        self._news: list[Command] = []
        self._patience = config.timeout.collective
        self._load_patience = config.timeout.sync
        super().__init__(config, place, store, identity, followers.planned)
        followers.finish(config.timeout.start)

    def add(self, request: GenerateRequest) -> None:
        super().add(request)
        self._news.append(["add", request_to_wire(request)])

    def drop(self) -> None:
        with suppress(RunError):  # a broken engine has nobody to tell, and ends by itself
            self._tell("drop")
        super().drop()

    def _step(self) -> list[Trajectory]:
        self._tell("step")
        landed = super()._step()
        if landed:
            self._tell("check")
            self._followers.agree(self.ledger.digest(), self.ledger.batches, self._patience)
        return landed

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._tell("sync_receive", version=version)
        super().load_weights(weights, version)
        self._mixture = f"not all of its ranks have confirmed policy version {version}"

    def settle(self) -> list[dict[str, Any]]:
        """What each follower says of the update, once this rank's part of it is over: none is done before all are.

        Until then the engine refuses to sample. Raises CallTimeout.
        """
        answers: list[dict[str, Any]] = self._followers.finish(self._load_patience)
        if not any("broken" in answer for answer in answers):
            self._mixture = ""
        return answers

    def sleep(self) -> int:
        self._tell("sleep")
        freed = super().sleep()
        self._followers.finish(self._load_patience)
        return freed

    def wake_up(self, part: str) -> None:
        self._tell("wake_up", part=part)
        super().wake_up(part)
        self._followers.finish(self._load_patience)

    def close(self) -> None:
        self._tell("close")
        super().close()

    def _tell(self, name: str, **arguments: Any) -> None:
        commands, self._news = [*self._news, [name, arguments]], []
        self._followers.send(commands)


def diverged(place: EnginePlace, tp_rank: int, batch: int) -> str:
    """What to say when two TP ranks have done different things."""
    return (
        f"{place} was stopped: rollout ranks {place.rank(0)} and {place.rank(tp_rank)} (TP ranks 0 and {tp_rank}) did "
        f"not do the same up to batch {batch}: other requests, another order or other tokens. What it was sampling was "
        "dropped. All ranks of an engine must run the same software on the same kind of device; if they do, this is a "
        "bug to report"
    )


def request_to_wire(request: GenerateRequest) -> dict[str, Any]:
    """For the control plane's codec."""
    wire = asdict(request)
    return wire | {"prompt_ids": np.asarray(request.prompt_ids, dtype=np.int32)}


def request_from_wire(wire: dict[str, Any]) -> GenerateRequest:
    return GenerateRequest(**(wire | {"sampling": Sampling(**wire["sampling"])}))
