"""A rank of the rollout role whose followers do what none may: reorder, draw other random numbers, forget a request.

Run as the worker is. MISFIT in the environment says what the follower of engine 0, 1, 2, ... does, comma-separated.
The engine's digest does not change: these followers go wrong behind its back.
"""

from __future__ import annotations

import os
from typing import Any

from slurm_rlhf.ranks import engine_follower as follower
from slurm_rlhf.ranks import engine_leader as rollout
from slurm_rlhf.ranks import rank_process as worker


class Misfit(follower.EngineFollower):
    def start(self) -> None:
        super().start()
        kind = os.environ["MISFIT"].split(",")[self.place.engine]
        core = self.engine._core.client
        if kind == "reversed":
            whole = core.get_output

            def reordering() -> Any:
                waiting = core.engine_core.scheduler.waiting
                held = [waiting.pop_request() for _ in range(len(waiting))]
                for request in reversed(held):
                    waiting.add_request(request)
                return whole()

            core.get_output = reordering
            return
        add = core.add_request

        def changed(request: Any) -> None:
            if kind == "unseeded":
                request.sampling_params.seed = None
            if kind != "uneven" or request.external_req_id != "3":
                add(request)

        core.add_request = changed


rollout.EngineFollower = Misfit  # type: ignore[misc]

if __name__ == "__main__":
    worker.main()
