"""Runs code of users in worker processes: a deadline for each call, and a new worker for one that has gone wrong.

Each worker is a child of one thread, which lives as long as the pool: the kernel ends the worker with that thread, also
when the conductor is killed. A worker does one call after the other. Its processes are a session of their own, and end
together. Other nodes have workers in such pools; here a thread stands for each (`workers.distant`).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from slurm_rlhf.cluster.processes import KEYS, exit_text
from slurm_rlhf.errors import WorkerError
from slurm_rlhf.observe.stacks import MAIN, SIGNAL, ThreadStack, read_stacks
from slurm_rlhf.polling import UNDER_WAY, wait_until
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.process import Channel

LATE, ENDED, MEMORY, RAISED, GONE = "late", "ended", "memory", "raised", "gone"
"""Kinds of `WorkerError`; gone: an earlier call has ended the process that a lease is of, or its node is lost."""


WORKER = "worker process"
"""Name of a worker's stack among those of the conductor's threads."""

_POOLS: WeakSet[WorkerPool] = WeakSet()


def stacks_of_workers() -> list[ThreadStack]:
    """Ask each worker of this process that does a call where it is; blocks as `WorkerPool.stack_texts`."""
    texts = [text for pool in list(_POOLS) for text in pool.stack_texts()]
    stacks = [stack for text in texts for stack in read_stacks(text) if stack.name == MAIN]
    return [replace(stack, name=WORKER) for stack in stacks]


class Code(NamedTuple):
    """Names a class of this package, of which each worker makes one object; arguments are plain values."""

    module: str
    name: str
    arguments: dict[str, Any]


def of_load(name: str, error: WorkerError) -> str:
    """Say why workers could not load the user's code, which is called `name` where the error does not say it."""
    advice = "; make it faster, or raise timeout.connect" if error.kind == LATE else ""
    return str(error) if error.kind == RAISED or str(error).startswith(name) else f"{name}: {error}{advice}"


class WorkerNode(Protocol):
    """Is another node that has workers for pools of this process."""

    def worker(self, pool: WorkerPool, number: int) -> PoolWorker:
        """Make what stands here for one of them; it is not started."""


WorkerNodes = Sequence[WorkerNode]
"""Where workers run; empty: here."""


@dataclass(slots=True)
class PoolCall:
    """Holds a call of a method of a worker's object, and its answer."""

    method: str
    arguments: tuple[Any, ...]
    timeout_s: float
    life: int | None = None  # number of the worker process that the call is for; None: any
    answer: Future[Any] = field(default_factory=Future)


class WorkerPool:
    """Has workers, which start at once. All methods may be called from any thread."""

    def __init__(
        self,
        code: Code,
        count: int,
        memory_mb: int,
        start_s: float,
        printed: Path | None = None,
        nodes: WorkerNodes = (),
        serves: bool = False,
    ) -> None:
        """Start `count` workers here or, where there are `nodes`, on each of these.

        `memory_mb`: what a worker may hold in memory, in MiB; 0: any amount. `start_s`: seconds until it has loaded its
        code. `printed`: the file for what workers print; None: it is printed as usual, but for tracebacks, unless this
        `serves` others.
        """
        self.traces = 2 if printed else int(serves)
        """Tracebacks that workers print; 0: none, 1: those of calls, 2: those of loading the code, too."""
        self.code, self.memory_mb, self.start_s, self.printed = code, memory_mb, start_s, printed
        self.count = count * max(len(nodes), 1)
        """Workers in all."""
        self.changed = threading.Condition()
        self.calls: deque[PoolCall] = deque()  # calls that any worker may take
        self.closed = False
        self._workers = [
            nodes[number % len(nodes)].worker(self, number) if nodes else PoolWorker(self, number)
            for number in range(self.count)
        ]
        for worker in self._workers:
            worker.start()
        _POOLS.add(self)

    def ready(self) -> None:
        """Wait until every worker has loaded its code, or failed to. Raises the WorkerError of the first that has."""
        for worker in self._workers:
            worker.started.result()

    def submit(self, method: str, *arguments: Any, timeout_s: float) -> Future[Any]:
        """Have the next free worker call a method of its object; the deadline begins when a worker begins.

        The future raises WorkerError. Arguments and answer are plain values.
        """
        return self.queue(self.calls, PoolCall(method, arguments, timeout_s))

    def lease(self) -> Lease:
        """Choose the worker with the fewest leases, for something that lives in it over several calls."""
        with self.changed:
            worker = min(self._workers, key=lambda worker: (worker.lost, worker.leases))
            worker.leases += 1
            return Lease(self, worker, worker.life)

    @property
    def ended(self) -> int:
        """Count the processes that have ended."""
        return sum(worker.life for worker in self._workers)

    def stack_texts(self) -> list[str]:
        """Ask each worker that does a call where it is. Blocks for WORKER_STACK_S and a poll at most."""
        workers = [worker for worker in self._workers if worker.busy]
        for worker in workers:
            worker.ask_stack()
        wait_until(lambda: all(worker.stack_text() for worker in workers), timeouts.WORKER_STACK_S)
        time.sleep(timeouts.POLL_S if workers else 0.0)  # a stack is written line by line
        return [worker.stack_text() for worker in workers]

    def close(self) -> None:
        """End all workers, also in the middle of a call, and wait for them. Waiting calls are cancelled."""
        with self.changed:
            self.closed = True
            for calls in (self.calls, *(worker.calls for worker in self._workers)):
                while calls:
                    calls.popleft().answer.cancel()
            self.changed.notify_all()
        for worker in self._workers:
            worker.join(timeouts.WORKER_END_S)

    def take(self, worker: PoolWorker) -> PoolCall | None:
        """Wait for a call for this worker, those to what lives in it first; None: the pool is closed.

        Workers of a lost node fail all calls: they take none as long as others can do it.
        """

        def some() -> bool:
            return bool(worker.calls or (self.calls and (not worker.lost or all(each.lost for each in self._workers))))

        with self.changed:
            self.changed.wait_for(lambda: self.closed or some())
            return None if self.closed else (worker.calls or self.calls).popleft()

    def queue(self, calls: deque[PoolCall], call: PoolCall) -> Future[Any]:
        """Append a call to those that any worker may take, or one. Raises WorkerError once the pool is closed."""
        with self.changed:
            if self.closed:
                raise WorkerError(ENDED, "the pool of workers is closed")
            calls.append(call)
            self.changed.notify_all()
        return call.answer


@dataclass(frozen=True, slots=True)
class Lease:
    """Calls one worker, until its process ends; then every call raises WorkerError of kind `ended`."""

    pool: WorkerPool
    worker: PoolWorker
    life: int

    def submit(self, method: str, *arguments: Any, timeout_s: float) -> Future[Any]:
        """As `WorkerPool.submit`. Calls of all leases of a worker come one after the other, in order."""
        return self.pool.queue(self.worker.calls, PoolCall(method, arguments, timeout_s, self.life))

    def end(self) -> None:
        """Give the place in the worker back, once."""
        with self.pool.changed:
            self.worker.leases -= 1


class PoolWorker(threading.Thread):
    """Starts a process, has it do calls, and starts another one when it has ended or has to."""

    def __init__(self, pool: WorkerPool, number: int) -> None:
        super().__init__(name=f"worker {number}", daemon=True)
        self.pool = pool
        self.calls: deque[PoolCall] = deque()  # to what lives in it
        self.leases = 0
        self.life = 0  # processes that have ended
        self.lost = ""  # why it can do no call any more
        self.started: Future[None] = Future()
        self.process: subprocess.Popen[bytes] | None = None
        self.busy = False
        self._stack = os.fdopen(os.memfd_create("stack"), "rb")  # the process writes it there when it is asked
        self._channel: Channel

    def run(self) -> None:
        self._replace()
        while (call := self.pool.take(self)) is not None:
            if call.answer.set_running_or_notify_cancel():
                try:
                    with UNDER_WAY.one(call.timeout_s):
                        answer = self._do(call)
                    call.answer.set_result(answer)
                except WorkerError as error:
                    call.answer.set_exception(error)
            if not self.there:
                self._replace()
        self._end()

    @property
    def there(self) -> bool:
        """Tell whether it has a process."""
        return self.process is not None

    def _replace(self) -> None:
        """Start a process; where it cannot start, the next call tries again and says why."""
        try:
            self._start()
        except WorkerError as error:
            if not self.started.done():
                self.started.set_exception(error)
        else:
            if not self.started.done():
                self.started.set_result(None)

    def _start(self) -> None:
        try:
            ours = self._popen()
        except OSError as error:  # no memory, no process, no descriptor is left
            raise WorkerError(ENDED, f"its process cannot be started: {error}") from error
        self._channel = Channel(ours)
        try:
            self._asked([*self.pool.code], self.pool.start_s, "load its code")
        except WorkerError:
            self._end()
            raise

    def _popen(self) -> socket.socket:
        """Start the process; return this end of the connection to it."""
        ours, theirs = socket.socketpair()
        own = theirs.fileno(), self._stack.fileno()
        command = [sys.executable, "-m", "slurm_rlhf.workers.process", *map(str, (*own, os.getpid(), self.pool.traces))]
        with theirs, open(self.pool.printed or os.devnull, "ab") as log:
            out = log if self.pool.printed else None
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={name: value for name, value in os.environ.items() if name != KEYS},
                pass_fds=own,
                start_new_session=True,
            )
        return ours

    def _do(self, call: PoolCall) -> Any:
        if call.life not in (None, self.life):
            raise WorkerError(GONE, "the process in which it lived has ended")
        if not self.there:
            self._start()
        self.busy = True
        try:
            return self._done(call)
        finally:
            self.busy = False

    def _done(self, call: PoolCall) -> Any:
        try:
            answer = self._asked([call.method, call.arguments], call.timeout_s, call.method)
        except WorkerError as error:
            if error.kind != RAISED:
                self._end()
            raise
        if self._too_large():
            self._end()
        return answer

    def _asked(self, message: list[Any], timeout_s: float, what: str) -> Any:
        """Send a message and wait for the answer. Raises WorkerError."""
        until = time.monotonic() + timeout_s
        try:
            self._channel.socket.settimeout(timeout_s)
            self._channel.send(message)
            answer = self._received(until)
        except TimeoutError:
            self._show_stack()
            raise WorkerError(LATE, f"{what} did not return within {timeout_s:g} s") from None
        except (EOFError, ConnectionError):
            raise WorkerError(ENDED, f"its process {self._how()}") from None
        except (TypeError, ValueError, RecursionError) as error:  # arguments that cannot be sent
            raise WorkerError(RAISED, f"{what}: {error}") from error
        if "raised" in answer:
            raise WorkerError(RAISED, answer["raised"])
        return answer["value"]

    def _received(self, until: float) -> Any:
        coming = select.poll()
        coming.register(self._channel.socket, select.POLLIN)
        while not coming.poll(timeouts.POLL_S * 1000):
            if self.pool.closed:
                raise WorkerError(ENDED, "the pool of workers was closed")
            if self._process.poll() is not None:
                raise EOFError
            if self._too_large():
                raise WorkerError(MEMORY, f"its process grew past {self.pool.memory_mb} MiB of memory")
            if time.monotonic() > until:
                raise TimeoutError
        return self._channel.receive()

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def _too_large(self) -> bool:
        if not self.pool.memory_mb:
            return False
        try:
            pages = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1]
        except (OSError, IndexError):  # it has just ended
            return False
        return int(pages) * os.sysconf("SC_PAGE_SIZE") > self.pool.memory_mb << 20

    def _how(self) -> str:
        try:
            return exit_text(self._process.wait(timeouts.WORKER_STACK_S))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def ask_stack(self) -> None:
        """Have the process write where it is; `stack_text` has it soon. It goes on."""
        os.ftruncate(self._stack.fileno(), 0)
        os.lseek(self._stack.fileno(), 0, os.SEEK_SET)
        if (process := self.process) is not None:
            with suppress(ProcessLookupError):
                process.send_signal(SIGNAL)

    def stack_text(self) -> str:
        """Return what the process has written since `ask_stack`."""
        return os.pread(self._stack.fileno(), 1 << 16, 0).decode("utf-8", errors="replace")

    def _show_stack(self) -> None:
        """Have the process write where it is to the log, if there is one, which ends it."""
        if not self.pool.traces:
            return
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGABRT)
            self._process.wait(timeouts.WORKER_STACK_S)

    def _end(self) -> None:
        """End the process and all that it has started, and wait for it."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._channel.close()
        self.process = None
        self.life += 1
