"""Keep the engines of one node: `python -m slurm_rlhf.launch.engine_node SPEC.json`, run by the step of a job.

How an engine ended is told through a file of the run directory, because nobody listens to this process; and a file
there says that an engine is to be ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slurm_rlhf.cluster.processes import die_with_parent
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.launch.engine_ranks import EngineRanks
from slurm_rlhf.launch.node import (
    IGNORED,
    RANK_MAP,
    interface_to_others,
    node_environment,
    take_cache,
    visible_gpus,
)
from slurm_rlhf.launch.step_spec import StepSpec, share_on
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.run_directory import write_atomically

POLL_S = 0.2
_LOOKS_S = 1.0
"""Between two looks for orders, on a file system that all nodes share."""


def ended_file(run_dir: Path, run_id: str, engine: int) -> Path:
    """Name the file that says how an engine of one start ended."""
    return run_dir / ".control" / f"ended.{run_id}.{engine}"


def end_file(run_dir: Path, run_id: str, engine: int) -> Path:
    """Name the file that tells the node of an engine to end what is left of it."""
    return run_dir / ".control" / f"end.{run_id}.{engine}"


def main() -> None:
    die_with_parent(os.getppid())
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)  # inherited by the ranks
    try:
        spec, engines = prepare(Path(sys.argv[1]), os.environ)
    except PlacementError as error:
        sys.exit(f"error: {error}")
    engines.start()
    looked = time.monotonic()
    while engines.running:
        tell(spec, engines)
        time.sleep(POLL_S)
        if time.monotonic() - looked > _LOOKS_S:
            looked = time.monotonic()
            obey(spec, engines)
    tell(spec, engines)


def obey(spec: StepSpec, engines: EngineRanks) -> None:
    """End the engines that are to be ended: a process that is stopped does not hear its conductor."""
    for engine in engines.numbers:
        if not engines.gone(engine) and end_file(Path(spec.run_dir), spec.run_id, engine).exists():
            engines.kill_engine(engine)


def tell(spec: StepSpec, engines: EngineRanks) -> None:
    """Write down which engines have ended."""
    for engine, how in engines.ended():
        print(f"engine {engine}: {how}", flush=True)
        try:
            write_atomically(ended_file(Path(spec.run_dir), spec.run_id, engine), how)
        except OSError as error:  # of a full disk; heartbeats tell it, too, a little later
            print(f"engine {engine}: {error}", flush=True)


def prepare(file: Path, environ: Mapping[str, str]) -> tuple[StepSpec, EngineRanks]:
    """Read the specification of the step, and make the engines of this node with their environment."""
    spec = StepSpec.read(file)
    run_dir = Path(spec.run_dir)
    ranks = RankMap.from_json(json.loads((run_dir / RANK_MAP).read_text(encoding="utf-8")))
    node = node_name(environ)
    share = share_on(ranks, ROLLOUT, node)
    own = {**spec.environment[node], **visible_gpus(ranks.topology, node, share.gpus, environ)}
    cache = take_cache(f"{spec.run_id}.{node}.{ROLLOUT}")
    logs, interface = run_dir / "logs", interface_to_others(ranks, node)
    environment = node_environment(environ, ROLLOUT, logs, cache, own, interface)
    print(f"{node}: ranks {share.ranks[0]} to {share.ranks[-1]}, slots {','.join(map(str, share.gpus))}", flush=True)
    return spec, EngineRanks(run_dir, ranks, node, spec.arguments, environment, spec.engines)


if __name__ == "__main__":
    main()
