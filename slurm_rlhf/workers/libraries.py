"""The heavy libraries of a role, imported before anybody listens for a rank's heartbeats.

Opening a library of gigabytes on a file system that many nodes read at once takes minutes, and the interpreter's lock
is held all the while: no heartbeat would leave, and the rank would count as lost.
"""

from __future__ import annotations

from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.config.schema import Config
from slurm_rlhf.workers.worker import Seat


def import_libraries(config: Config, seat: Seat) -> None:
    """Import what the role of `seat` works with. No device is touched; engines see their own GPUs only from now on."""
    row = ROLES[seat.role]
    if row.kind == "engine":
        from slurm_rlhf.rollout._vllm import import_vllm
        from slurm_rlhf.workers.engine_worker import prepare_process

        prepare_process(config, seat)
        import_vllm()
        return
    from slurm_rlhf.training.deepspeed_engine import import_trainers

    # A frozen model that is whole does without DeepSpeed.
    import_trainers(deepspeed=row.kind == "trained" or row.settings(config).zero_stage == 3)
