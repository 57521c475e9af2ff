"""A rank of the rollout role: one vLLM engine, fed as a stream."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.request import Request
from slurm_rlhf.records import Sampling
from slurm_rlhf.roles.role import Role, Seat
from slurm_rlhf.rollout.environment import prepare_environment
from slurm_rlhf.rollout.request import GenerateRequest
from slurm_rlhf.rollout.seeds import request_seed
from slurm_rlhf.sync.session import EngineEnd


@dataclass(slots=True)
class _Order:
    """A `generate` call that is being worked on."""

    request: Request
    outstanding: int
    finished: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # position -> trajectories


class RolloutRole(Role):
    """Owns the engine's step loop: calls are looked at between two steps, never during one."""

    def __init__(self, config: Config, seat: Seat, client: ControlClient) -> None:
        super().__init__(config, seat, client)
        own_device(seat.local_rank)
        prepare_environment()
        self.sync = EngineEnd(config, f"{seat.role} {seat.rank}")
        self._open: dict[tuple[int, int], tuple[_Order, int]] = {}  # (prompt, sample) -> its order, its position there
        self._after_drain: list[Request] = []

    def calls(self) -> dict[str, Callable[..., Any]]:
        return {
            "start": self.start,
            "sync_join": self.sync_join,
            "sync_receive": self.sync_receive,
        }

    def start(self, total_steps: int) -> None:
        """Start the engine. `total_steps` is of no use to it."""
        from slurm_rlhf.rollout.vllm_engine import VllmEngine

        self.engine = VllmEngine(self.config, self.seat.rank)

    def handle(self, request: Request) -> None:
        """`generate` is answered when its last response is finished; everything else at once.

        New weights wait for the responses in flight, unless vllm.sync_mode lets them change under those.
        """
        if request.method == "sync_receive" and self._open and self.config.vllm.sync_mode == "drain":
            self._after_drain.append(request)
            return
        if request.method != "generate":
            super().handle(request)
            return
        try:
            self._generate(request, **request.args)
        except Exception as error:
            request.fail(error)

    def _generate(
        self, request: Request, prompts: list[list[Any]], sampling: dict[str, Any], run_seed: int, version: int
    ) -> None:
        """Queue `sampling.n` responses to each of `prompts` [[position, prompt, token ids], ...]."""
        how = Sampling(**sampling)
        order = _Order(request, len(prompts) * how.n, {position: [] for position, _, _ in prompts})
        for position, prompt, token_ids in prompts:
            for sample in range(how.n):
                self._open[prompt, sample] = (order, position)
                seed = request_seed(run_seed, prompt, sample, version)
                self.engine.add(GenerateRequest(f"{prompt}.{sample}", prompt, sample, token_ids, how, seed))

    def busy(self) -> bool:
        return bool(self._open)

    def advance(self) -> None:
        """One engine step; answers the orders that it completed."""
        if not self._open:
            return
        try:
            landed = self.engine.step()
        except Exception as error:
            self._drop(error)
            return
        for trajectory in landed:
            order, position = self._open.pop((trajectory.prompt, trajectory.sample))
            order.finished[position].append(trajectory.to_wire())
            order.outstanding -= 1
            if order.outstanding == 0:
                order.request.reply([[place, found] for place, found in order.finished.items()])
        self._drained()

    def _drained(self) -> None:
        while self._after_drain and not self._open:
            super().handle(self._after_drain.pop(0))

    def _drop(self, error: Exception) -> None:
        """An engine that failed a step has lost all of its requests."""
        for request in {id(order.request): order.request for order, _ in self._open.values()}.values():
            request.fail(error)
        self._open.clear()
        self._drained()

    def sync_join(self, parameters: list[list[Any]], **group: Any) -> dict[str, Any]:
        """Join the group of a weight transfer; `parameters` is what the actor will send."""
        return self.sync.join(parameters, self.engine.describe(), **group)

    def sync_receive(self, version: int) -> dict[str, Any]:
        """Take over policy `version`; requests in flight go on under it."""
        return self.sync.receive(version, self.engine.load_weights)

    def close(self) -> None:
        if hasattr(self, "engine"):
            gc.freeze()  # vLLM collects garbage twice in here; the process is about to end anyway
            self.engine.close()


def own_device(local_rank: int) -> None:
    """Leave only this engine's GPU visible: vLLM takes the first one it sees. Comes before CUDA is initialized."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = [device for device in os.environ.get(name, "").split(",") if device]
        if visible:
            os.environ[name] = visible[local_rank]
