"""`python -m slurm_rlhf.workers.main`: the main of every rank of every role, under torchrun."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from slurm_rlhf.cluster.inherited import KEYS
from slurm_rlhf.cluster.kernel_cache import KernelCache, cache_variables, take_kernel_cache
from slurm_rlhf.cluster.parent_death import die_with_parent
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.auth import RunKeys
from slurm_rlhf.control.calls import RankCalls
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.messages import TERMINATION
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.workers.role_store import open_store
from slurm_rlhf.workers.worker import Role, Seat

SHUTDOWN = RankCalls.shutdown.__name__

_USUAL = gc.get_threshold()[0]
_RARELY = 100_000  # new objects


def take_seat(role: str, first_rank: int, world: int) -> Seat:
    """Who this process is: torchrun counts the processes of this node, the rank map says where its count begins."""
    local_rank = int(os.environ["LOCAL_RANK"])
    return Seat(role, first_rank + local_rank, world, local_rank, node_name())


def log_to(path: Path) -> None:
    """Send everything this process prints to its own log, libraries written in C included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def collect_rarely() -> None:
    """Look for garbage rarely until `collect_as_usual`: imports make a million objects, and next to no garbage."""
    gc.set_threshold(_RARELY)


def collect_as_usual() -> None:
    """What is left now of starting stays, and no later collection looks at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_USUAL)


def take_caches(config: Config, seat: Seat) -> KernelCache | None:
    """The directory of what this process compiles, named in its environment: before anything is compiled."""
    train = config.train
    cache, told = take_kernel_cache(train.kernel_cache, seat.role, seat.local_rank, train.kernel_cache_gib)
    print(told, flush=True)
    if cache is not None:
        os.environ.update(cache_variables(cache.directory))
    return cache


def serve(client: ControlClient, role: Role, cache: KernelCache | None) -> None:
    """Answer calls until the conductor says `shutdown`."""
    started = False
    while True:
        request = client.receive(0.0 if role.busy() else None)
        if request is None:
            role.advance()
        else:
            client.phase = request.method
            if request.method == SHUTDOWN:
                request.reply(role.shutdown())
                return
            role.handle(request)
            if not role.busy():
                client.phase = f"idle after {request.method}"
        if not started:  # the first thing that a rank is told is to load what it works with
            started = True
            collect_as_usual()
            if cache is not None and (request is None or not request.failed):
                cache.started()


def hold_termination() -> bool:
    """True inside a Slurm step, where SIGTERM is kept for `relay_termination`; it must come before any thread."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        return False
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return True


def relay_termination(client: ControlClient) -> None:
    """Tell the conductor of SIGTERM: Slurm sends it to the steps when it preempts a job, not to the batch script."""

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        client.event(TERMINATION)

    threading.Thread(target=wait, name="termination", daemon=True).start()


def _leave(reason: str) -> None:
    """Nobody is there to work for. The main thread may sit in a collective that never ends, so do not ask it."""
    print(f"the conductor is gone: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a role; started by the conductor, not by hand.")
    parser.add_argument("--role", required=True, choices=sorted(ROLES))
    parser.add_argument("--run_dir", required=True, type=Path)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--first_rank", required=True, type=int)
    parser.add_argument("--world", required=True, type=int)
    arguments = parser.parse_args()

    collect_rarely()
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the conductor's to answer
    held = hold_termination()
    directory = RunDirectory(arguments.run_dir)
    seat = take_seat(arguments.role, arguments.first_rank, arguments.world)
    log_to(directory.role_log(seat.role, seat.node, seat.rank))
    config = load_config(directory.config, [])
    cache = take_caches(config, seat)
    store = open_store()  # alive as long as this process
    # Before there is a client: from its hello on, silence is a sign of death.
    importlib.import_module("slurm_rlhf.workers.libraries").import_libraries(config, seat)
    role = ROLES[seat.role].load_worker()
    client = ControlClient(
        arguments.endpoint,
        RunKeys.parse(os.environ[KEYS], KEYS) if KEYS in os.environ else RunKeys.load(directory.keys),
        seat.role,
        seat.rank,
        seat.world,
        host=seat.node,
        heartbeat_interval=config.timeout.heartbeat_interval,
        heartbeat_limit=config.timeout.heartbeat,
        on_conductor_lost=_leave,
    )
    client.connect(config.timeout.connect)
    if held:
        relay_termination(client)
    try:
        serve(client, role(config, seat, client), cache)
        client.close()
        del store
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    # Interpreter teardown of torch, gloo and vLLM takes seconds and can hang; everything is closed by now.
    os._exit(0)


if __name__ == "__main__":
    main()
