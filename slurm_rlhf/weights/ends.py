"""The two ends of a transfer: the actor's ranks send buckets, the engines' ranks check them and load parameters.

Tried with vLLM 0.32: a `WeightTransferEngine` of our own, registered with its factory, is as fast (71 MB: 0.99 and
1.00 s) and no less code. After an update that is cut off vLLM leaves the model half loaded (gpu_worker.py, 1582: the
reload is not finished; 43 parameters on `meta`), so that the engine has to mend it all the same; it checks no names,
repairs no tied heads, and keeps the prefix cache. The engine is made while the model loads, before any group exists,
and one iterator of weights becomes three remote calls. So `Receiver.update` stays an iterator, for any engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import TCPStore

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import SyncBroken, SyncError, shortened_lines
from slurm_rlhf.records import SyncConnection, SyncReport
from slurm_rlhf.weights.backends import Incoming, PendingTransfer
from slurm_rlhf.weights.backends.table import make_backend
from slurm_rlhf.weights.bucket import Assembly, Pool, SpanSource, fill
from slurm_rlhf.weights.group import Described, SyncGroup, connection, join_run
from slurm_rlhf.weights.rendezvous import listen
from slurm_rlhf.weights.transfer_plan import DEPTH, ITEM_SIZE, BucketPart, Span, SyncPlan, dtype_name
from slurm_rlhf.weights.update import following, leading

Held = Mapping[str, tuple[int, torch.Tensor]]
"""Parameter -> the part that a rank holds: index of its first element in the flat parameter, and elements [n]."""


class Sender:
    """Send updates, as an actor rank of a group."""

    def __init__(self, group: SyncGroup, plan: SyncPlan) -> None:
        """Make the backend, together with the other members. Raises SyncError."""
        group.agree(plan.fingerprint())
        self.group = group
        self.plan = plan
        self.backend = make_backend(group, plan)
        self._pool = Pool(self.backend.device)

    @property
    def peak(self) -> int:
        """Return the most bytes held at a time: for this rank's parts, and on a GPU for whole buckets, too."""
        return self._pool.peak + (self.backend.pool.peak if self.backend.device.type == "cuda" else 0)

    def push(self, held: Held, version: int) -> SyncReport:
        """Send this rank's share of policy `version`; on rank 0, return when every engine rank has loaded it.

        Raises SyncError within `timeout.sync`, naming the member that died, hangs or refused; the group is spent.
        """
        start = time.monotonic()
        frame = leading if self.group.rank == 0 else following
        with frame(self.group, version):
            source = span_source(self.plan, held)
            filling = self._send(source, version)
            self.backend.flush()
        return SyncReport(nbytes=self.plan.payload, seconds=time.monotonic() - start, checksum_s=filling)

    def _send(self, source: SpanSource, version: int) -> float:
        """Send this rank's parts; return the seconds in which they were written, their checksums included."""
        on_the_way: deque[tuple[int, PendingTransfer]] = deque()
        buffers = DEPTH - 1  # two at least: one is filled while the other is on its way
        filling = 0.0
        for bucket in range(len(self.plan.buckets)):
            while on_the_way and on_the_way[0][0] <= bucket - buffers:
                on_the_way.popleft()[1].wait()
            for stream, part in self._mine(bucket):
                buffer = self._pool.take(part.nbytes)
                started = time.monotonic()
                apart = fill(buffer, part, bucket, version, source, self._pool)
                filling += time.monotonic() - started
                on_the_way.append((bucket, self.backend.send(bucket, stream, part, buffer, apart)))
                del buffer, apart
        while on_the_way:
            on_the_way.popleft()[1].wait()
        return filling

    def _mine(self, bucket: int) -> list[tuple[int, BucketPart]]:
        return [
            (stream, part)
            for stream, taking in enumerate(self.plan.streams)
            if self.group.rank in taking.owners
            for part in self.plan.parts(bucket, stream)
            if part.owner == self.group.rank
        ]


class ActorEnd:
    """Answer the weight sync calls of a run, as an actor rank: groups come and go, updates may be repeated."""

    def __init__(self, config: Config, label: str) -> None:
        self._config = config
        self._label = label
        self._sender: Sender | None = None
        self._stores: list[TCPStore] = []

    def listen(self, host: str) -> int:
        """Open the store where the members of the next group meet, and return its port. Raises SyncError."""
        # The previous group's store stays open: its members may still read there why it ended.
        self._stores = [*self._stores[-1:], listen(host, self._config.timeout.sync)]
        return self._stores[-1].port

    def join(self, parameters: Described, **group: Any) -> SyncConnection:
        """Leave the group of before, and join the one that `group`, fields of `Membership`, describes.

        Returns how this rank is connected. Raises SyncError, ConfigError.
        """
        if self._sender is not None:
            self._sender.group.close()
        joined, plan = join_run(self._config, self._label, parameters, group)
        self._sender = Sender(joined, plan)
        return connection(joined)

    def push(self, held: Held, version: int) -> SyncReport:
        """Send this rank's share as policy `version`; the report says if it broke off, and a new group may help.

        Raises SyncError for everything else.
        """
        assert self._sender is not None
        try:
            return self._sender.push(held, version)
        except SyncBroken as broken:
            return SyncReport(broken=str(broken), silent=broken.hang)


def span_source(plan: SyncPlan, held: Held) -> SpanSource:
    """Read spans from what this rank holds. Raises SyncError where that is not what the plan says."""
    for parameter in plan.parameters:
        if parameter.name not in held:
            raise SyncError(f"the actor has no parameter {parameter.name!r}, which is in the plan")

    def read(span: Span) -> torch.Tensor:
        parameter = plan.parameters[span.parameter]
        first, elements = held[parameter.name]
        size = ITEM_SIZE[parameter.dtype]
        low, high = span.low // size - first, span.high // size - first
        if low < 0 or high > elements.numel():
            raise SyncError(
                f"this rank holds elements {first} to {first + elements.numel()} of {parameter.name!r}, the plan wants "
                f"{span.low // size} to {span.high // size} of {parameter.numel} from it"
            )
        # Under autocast (ZeRO-0, bf16) the actor has fp32 parameters, which it rounds in the same way to compute.
        return elements[low:high].to(getattr(torch, parameter.dtype)).view(torch.uint8)

    return read


_SHOWN = 8  # differences that a message names
_HOLDS = {"float32": {"float32", "bfloat16", "float16"}, "bfloat16": {"bfloat16"}, "float16": {"float16"}}
"""dtype -> those whose values it holds exactly. bf16 has more exponent bits than fp16, and fewer mantissa bits."""


class Receiver:
    """Receive updates, as an engine rank of a group."""

    def __init__(self, group: SyncGroup, plan: SyncPlan, expected: Described | None = None) -> None:
        """Make the backend, together with the other members. `expected`: what this end is able to load.

        Raises SyncError, at the other members too, when both ends differ in a name, a shape or a dtype.
        """
        self.group = group
        self.plan = plan
        self.verify_s = 0.0  # seconds of the last update that went into checksums and into putting parameters together
        try:
            if expected is not None:
                check_match(plan.described, expected, str(group.members[0]), str(group.me))
            group.agree(plan.fingerprint())
        except SyncError as error:
            group.abort(str(error))
            raise
        self.backend = make_backend(group, plan)
        self._stream = plan.stream_to(group.rank)
        self.pool = Pool(self.backend.device)  # memory of parameters that are put together

    @property
    def peak(self) -> int:
        """Return the most bytes held at a time: for buckets, and for parameters that are put together."""
        return self.backend.pool.peak + self.pool.peak

    @contextmanager
    def update(self, version: int) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Yield the parameters of policy `version`, in layer order, as they arrive:

            with receiver.update(version) as weights:
                engine.load(weights, version)

        The block's end tells rank 0 that they are loaded. The tensors lie on the backend's device, in memory that
        is not used again as long as one of them lives: an engine may keep them. Raises SyncError naming the parameters
        whose checksum differs, or who broke the update; rank 0 learns of any error that the block raises.
        """
        with following(self.group, version):
            weights = self._weights(version)
            yield weights
            left_over = sum(1 for _ in weights)
            if left_over:
                raise SyncError(f"the engine left {left_over} of the {len(self.plan.parameters)} parameters unread")
            self.backend.flush()

    def _weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Have further buckets on their way while the engine loads one; leave the last slot to slower neighbours."""
        assembly = Assembly(self.plan, self.pool)
        self.verify_s = 0.0
        buckets = len(self.plan.buckets)
        ahead: deque[Incoming] = deque()
        asked = 0
        for bucket in range(buckets):
            while asked < min(bucket + DEPTH - 1, buckets):
                ahead.append(self.backend.receive(asked))
                asked += 1
            incoming = ahead.popleft()
            buffer = incoming.wait()
            parts = self.plan.parts(bucket, self._stream)
            started = time.monotonic()
            if incoming.lent:
                found = assembly.copies(buffer, parts, bucket, version)
            else:
                found = assembly.parameters(buffer, parts, bucket, version, incoming.sums)
            self.verify_s += time.monotonic() - started
            del buffer
            while True:
                started = time.monotonic()
                name, tensor = next(found, ("", None))
                self.verify_s += time.monotonic() - started
                if tensor is None:
                    break
                yield name, tensor
                del tensor
            del found
            incoming.release()


class EngineEnd:
    """Answer the weight sync calls of a run, as an engine rank."""

    def __init__(self, config: Config, label: str) -> None:
        self._config = config
        self._label = label
        self._receiver: Receiver | None = None

    def join(self, parameters: Described, expected: Described, **group: Any) -> SyncConnection:
        """Do as `ActorEnd.join`; the engine is able to load `expected`."""
        if self._receiver is not None:
            self._receiver.group.close()
        joined, plan = join_run(self._config, self._label, parameters, group)
        self._receiver = Receiver(joined, plan, expected)
        return connection(joined)

    def receive(self, version: int, load: Callable[[Iterator[tuple[str, torch.Tensor]], int], None]) -> SyncReport:
        """Hand policy `version` to `load(weights, version)`. Returns and raises as `ActorEnd.push` does."""
        assert self._receiver is not None
        try:
            with self._receiver.update(version) as weights:
                load(weights, version)
        except SyncBroken as broken:
            return SyncReport(broken=str(broken), silent=broken.hang)
        return SyncReport(checksum_s=self._receiver.verify_s)


def check_match(sent: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]], sender: str, receiver: str) -> None:
    """Raise SyncError unless both ends have the same names, shapes, and dtypes that hold what is sent.

    Both lists are [[name, shape, dtype], ...]; `sender` and `receiver` name the two ends in the message.
    """
    ours = {name: tuple(shape) for name, shape, _ in expected}
    theirs = {name: tuple(shape) for name, shape, _ in sent}
    lines = [f"{name}: only {sender} has it" for name in theirs if name not in ours]
    lines += [f"{name}: only {receiver} has it" for name in ours if name not in theirs]
    lines += [
        f"{name}: {list(theirs[name])} at {sender}, {list(shape)} at {receiver}"
        for name, shape in ours.items()
        if theirs.get(name, shape) != shape
    ]
    if lines:
        raise SyncError(
            f"{sender} and {receiver} do not hold the same architecture:{shortened_lines(lines, _SHOWN)}"
            "\nBoth must be started from the same model directory (actor.model_name_or_path)."
        )
    _check_dtypes(sent, expected, sender, receiver)


def _check_dtypes(sent: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]], sender: str, receiver: str) -> None:
    kept = {name: dtype_name(dtype) for name, _, dtype in expected}
    lossy = [
        f"{name}: {theirs} at {sender}, {kept[name]} at {receiver}"
        for name, _, dtype in sent
        if (theirs := dtype_name(dtype)) not in _HOLDS[kept[name]]
    ]
    if lossy:
        raise SyncError(
            f"{receiver} cannot hold the weights of {sender} without rounding them:{shortened_lines(lossy, _SHOWN)}"
            "\nLeave vllm.dtype at auto, which is ds.param_dtype, or name one that holds it."
        )
