"""The main program of every rank of every role: `python -m slurm_rlhf.ranks.rank_process`, under torchrun."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slurm_rlhf.cluster.local_directory import KernelCache, cache_variables, take_kernel_cache
from slurm_rlhf.cluster.processes import (
    CONDUCTOR_GONE,
    CONDUCTOR_GONE_STATUS,
    KEYS,
    PARENT,
    STORE_FD,
    die_with_parent,
    keep_others_out,
    print_to,
)
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import system_cause
from slurm_rlhf.observe.stacks import late_s
from slurm_rlhf.ranks.worker import LATE, RankInfo, Worker, record_flights, take_stacks
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.calls import ActorCalls, RankCalls
from slurm_rlhf.wire.client import THREAD_FAILED, ControlClient
from slurm_rlhf.wire.messages import TERMINATION

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SHUTDOWN = RankCalls.shutdown.__name__

_USUAL = gc.get_threshold()[0]
_RARELY = 100_000  # new objects between two collections of garbage
_ARENA = 1 << 20  # bytes: what Python asks the system for at once


def crash_at_once() -> None:
    """End at once on a segmentation fault.

    A library that engines load (tvm_ffi) writes C stacks first, for up to 14 s, in which a dead engine seems alive.
    """
    if not faulthandler.is_enabled():  # enabled by the user: Python stacks, which take no time
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)


def take_caches(config: Config, info: RankInfo) -> KernelCache | None:
    """Set the variables that name the directory of compiled kernels; to be called before anything is compiled."""
    train = config.train
    cache, note = take_kernel_cache(train.kernel_cache, info.role, info.local_rank, train.kernel_cache_gib)
    print(note, flush=True)
    if cache is not None:
        os.environ.update(cache_variables(cache.directory))
    return cache


def has_loaded(cache: KernelCache | None, failed: bool) -> None:
    """Complete the start after the first call, in which a rank has loaded its model unless it `failed`."""
    crash_at_once()
    gc.collect()
    gc.freeze()  # later collections pass over what the start has made
    gc.set_threshold(_USUAL)
    if cache is not None and not failed:
        cache.started()


def serve(client: ControlClient, worker: Worker, loaded: Callable[[bool], None] | None = None) -> None:
    """Answer calls until the conductor calls `shutdown`.

    `loaded`: called once after the first call, which lets a worker load what it works with; True: that call failed.
    """
    while True:
        request = client.receive(0.0 if worker.busy() else None)
        if request is None:
            worker.advance()
        else:
            client.phase = request.method
            if request.method == SHUTDOWN:
                request.reply(worker.shutdown())
                return
            worker.handle(request)
            if not worker.busy():
                client.phase = f"idle after {request.method}"
        if loaded is not None:
            loaded(request is not None and request.failed)
            loaded = None


def import_libraries(config: Config, info: RankInfo) -> None:
    """Import the heavy libraries of a role. No device is touched; engines see their own GPUs only from now on.

    It comes before anybody listens for the rank's heartbeats. Opening a library of gigabytes on a file system that many
    nodes read at once takes minutes, and the interpreter's lock is held all the while: no heartbeat would leave, and
    the rank would count as lost.
    """
    if ROLES[info.role].kind == "engine":
        from slurm_rlhf.ranks.engine_follower import prepare_process

        prepare_process(config, info)
        return
    from slurm_rlhf.trainer.backends import import_trainers

    import_trainers(config, info.role, info.world)


def open_store() -> TCPStore | None:
    """Open the store of the role's ranks on the socket that this process inherited; None: another process has it.

    For launches without torchrun. The port was bound before anybody knew it, so nobody else can have it.
    """
    if STORE_FD not in os.environ:
        return None
    from torch.distributed import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=int(os.environ[STORE_FD]),
    )


def hold_termination() -> bool:
    """Inside a Slurm step, keep SIGTERM for `relay_termination` and return True; it comes before any thread."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        return False
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return True


def relay_termination(client: ControlClient) -> None:
    """Tell the conductor when SIGTERM comes: Slurm preempts a job by sending it to the steps, not to the script."""

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        client.event(TERMINATION)

    threading.Thread(target=wait, name="termination", daemon=True).start()


def _leave(reason: str) -> None:
    """End this process: it hears its conductor no more, and its main thread may sit in a collective that never ends."""
    own = reason == THREAD_FAILED
    try:
        print(reason if own else f"{CONDUCTOR_GONE}: {reason}", file=sys.stderr, flush=True)
    finally:  # without memory, `print` fails
        os._exit(1 if own else CONDUCTOR_GONE_STATUS)


def beat(late: float) -> None:
    """Put off, at each heartbeat, the stacks: they are written once `late` seconds have passed without one.

    A process that has used up its address space ends here: a new thread without memory can run no Python code, and the
    thread that starts it waits for ever.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit - _address_space() < _ARENA:
        print(system_cause(MemoryError.__name__), file=sys.stderr, flush=True)
        os._exit(1)
    LATE.put_off(late)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def run_program(program: str, words: list[str], config: Config, held: bool) -> NoReturn:
    """Form the group of the role's ranks, run `program` in it, which needs no conductor, and end this process."""
    from slurm_rlhf.trainer.distributed import join_world

    join_world(config.timeout.collective, config.timeout.connect)
    LATE.stop()  # no stacks are due: no heartbeats follow to put them off
    if held:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # it is ignored until the program takes it
    module, _, name = program.partition(":")
    status = getattr(importlib.import_module(module), name)(config, *words)
    sys.stdout.flush()
    os._exit(status)  # as `main` does


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a role; started by the conductor, not by hand.")
    parser.add_argument("--role", required=True, choices=sorted(ROLES))
    parser.add_argument("--run_dir", required=True, type=Path)
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--first_rank", required=True, type=int)
    parser.add_argument("--world", required=True, type=int)
    parser.add_argument("--role_start", default=0, type=int, help="which start of the role this is")
    parser.add_argument("--program", default="", help="module:name to call with (config, words) in place of a worker")
    parser.add_argument("--words", nargs="*", default=[], help="what the program gets")
    arguments = parser.parse_args()

    gc.set_threshold(_RARELY)  # until `has_loaded`: imports make a million objects, and next to no garbage
    keep_others_out()
    die_with_parent(int(os.environ.pop(PARENT, os.getppid())))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the conductor answers Ctrl-C
    held = hold_termination()
    directory = RunDirectory(arguments.run_dir)
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun counts the processes of a node
    info = RankInfo(arguments.role, arguments.first_rank + local_rank, arguments.world, local_rank, node_name())
    print_to(directory.role_log(info.role, info.node, info.rank))
    config = load_config(directory.config, [])
    # An import from a slow file system holds the interpreter's lock for minutes.
    LATE.put_off(config.timeout.connect / 2)
    record_flights(directory.keys.parent, info)
    cache = take_caches(config, info)
    keys = RunKeys.parse(os.environ.pop(KEYS), KEYS) if KEYS in os.environ else RunKeys.load(directory.keys)
    store = open_store()  # alive as long as this process
    # Before there is a client: from its hello on, a silent rank counts as lost.
    import_libraries(config, info)
    from slurm_rlhf.process_groups._torch import protect  # it needs torch
    from slurm_rlhf.weights.group import abort_newest

    protect(keys.client_secret)
    if arguments.program:
        run_program(arguments.program, arguments.words, config, held)
    make_worker = ROLES[info.role].load_worker()
    client = ControlClient(
        arguments.endpoint,
        keys,
        info.role,
        info.rank,
        info.world,
        host=info.node,
        start=arguments.role_start,
        heartbeat_interval=config.timeout.heartbeat_interval,
        heartbeat_limit=config.timeout.heartbeat,
        on_conductor_lost=_leave,
        on_beat=partial(beat, late_s(config.timeout.heartbeat)),
        threaded={RankCalls.stacks.__name__: take_stacks, ActorCalls.sync_abort.__name__: abort_newest},
    )
    client.connect(config.timeout.connect)
    if held:
        relay_termination(client)
    try:
        serve(client, make_worker(config, info, client), partial(has_loaded, cache))
        client.close()
        LATE.stop()
        del store
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(CONDUCTOR_GONE_STATUS if client.conductor_lost else 1)
    sys.stdout.flush()
    # Interpreter teardown of torch, gloo and engines takes seconds and can hang; everything is closed by now.
    os._exit(0)


if __name__ == "__main__":
    main()
