"""A rank of the rollout role: one vLLM engine, fed as a stream."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.request import Request
from slurm_rlhf.records import Sampling
from slurm_rlhf.roles.role import Role, Seat
from slurm_rlhf.roles.tickets import Tickets
from slurm_rlhf.rollout.environment import prepare_environment
from slurm_rlhf.rollout.meter import Meter
from slurm_rlhf.rollout.request import GenerateRequest
from slurm_rlhf.rollout.seeds import request_seed
from slurm_rlhf.sync.group import join
from slurm_rlhf.sync.receive import Receiver


class RolloutRole(Role):
    """Owns the engine's step loop: calls are looked at between two steps, never during one."""

    def __init__(self, config: Config, seat: Seat, client: ControlClient) -> None:
        super().__init__(config, seat, client)
        own_device(seat.local_rank)
        prepare_environment()
        self.meter = Meter()
        self._tickets = Tickets()
        self._open: dict[tuple[int, int], tuple[int, int]] = {}  # (prompt, sample) -> its stream, its position there

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
        """`generate` is answered when as many responses are finished as it asks for; everything else at once."""
        if request.method != "generate":
            super().handle(request)
            return
        try:
            self._generate(request, **request.args)
        except Exception as error:
            request.fail(error)

    def _generate(
        self,
        request: Request,
        prompts: list[list[Any]],
        sampling: dict[str, Any],
        run_seed: int,
        version: int,
        stream: int,
    ) -> None:
        """Queue `sampling.n` responses to each of `prompts` [[position, prompt, token ids], ...].

        Calls of one `stream` are answered as `Tickets` says, with {"found": [[position, trajectory], ...], "load"}.
        """
        how = Sampling(**sampling)
        self._tickets.open(stream, request, len(prompts) * how.n)
        for position, prompt, token_ids in prompts:
            for sample in range(how.n):
                self._open[prompt, sample] = (stream, position)
                seed = request_seed(run_seed, prompt, sample, version)
                self.engine.add(GenerateRequest(f"{prompt}.{sample}", prompt, sample, token_ids, how, seed))

    def busy(self) -> bool:
        return bool(self._open)

    def advance(self) -> None:
        """One engine step; answers the calls that it completed."""
        if not self._open:
            return
        self.meter.begin()
        try:
            landed = self.engine.step()
        except Exception as error:
            self._drop(error)
            return
        self.meter.stepped(self.engine.gauges, len(landed))
        for trajectory in landed:
            stream, position = self._open.pop((trajectory.prompt, trajectory.sample))
            completed = self._tickets.finish(stream, [position, trajectory.to_wire()])
            if completed:
                request, found = completed
                request.reply({"found": found, "load": self.meter.take().to_wire()})
        if not self._open:
            self.meter.rest()

    def _drop(self, error: Exception) -> None:
        """An engine that failed a step has lost all of its requests."""
        self._tickets.fail(error)
        self._open.clear()
        self.meter.rest()

    def sync_join(self, parameters: list[list[Any]], **group: Any) -> None:
        """Join the group of a weight transfer; `parameters` is what the actor will send."""
        sync = self.config.sync
        self.receiver = Receiver(
            join(
                **group,
                timeout_s=self.config.timeout.sync,
                backend=sync.backend,
                interface=sync.interface,
                label=f"{self.seat.role} {self.seat.rank}",
            ),
            self.engine.describe(),
        )

    def sync_receive(self, version: int) -> None:
        """Take over policy `version`; requests in flight go on under it."""
        with self.receiver.update(version) as weights:
            self.engine.load_weights(weights, version)

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
