"""Build process groups, sign stores, authenticate ranks, unpickle, share GPU memory; written for torch 2.13.0.

_C/_distributed_c10d.so ProcessGroupGloo.__init__(store, rank, size, options)
_C/_distributed_c10d.so ProcessGroupGloo.create_device(*, hostname, lazy_init)
_C/_distributed_c10d.so ProcessGroupGloo._Options()
_C/_distributed_c10d.so ProcessGroupGloo._Options._timeout
_C/_distributed_c10d.so ProcessGroupGloo._Options._devices
_C/_distributed_c10d.pyi ProcessGroupNCCL.__init__(self, store, rank, size, options)
_C/_distributed_c10d.pyi Options._timeout
_C/_distributed_c10d.pyi ProcessGroup._get_backend(self, device)
_C/_distributed_c10d.pyi ProcessGroup._device_types
distributed/distributed_c10d.py _unpickler
distributed/distributed_c10d.py _new_process_group_helper
storage.py _load_from_bytes
_C/_distributed_c10d.so Backend._start_coalescing()
_C/_distributed_c10d.so Backend._end_coalescing()
_C/_distributed_c10d.so Backend._allgather_base(output, input)
storage.py _StorageBase._share_cuda_
storage.py _StorageBase._new_shared_cuda
"""

from __future__ import annotations

import hmac
import io
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore, Work, distributed_c10d

from slurm_rlhf.errors import StrangerError

Transfer = Callable[[Tensor, int], Any]
"""Starts to send bytes to a rank, or to receive them, and returns the Work to wait for."""

OWN_ERRORS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Variables that the constructor of ProcessGroupNCCL reads, for groups that handle their own errors. Blocking wait
switches off the library's watchdog thread, which would have the process's first group, the training's, dump its state
and end the process, whatever ASYNC_ERROR_HANDLING says. Nothing here calls `wait` before an operation is over."""

_BYTES = 32  # length of a nonce, and of an HMAC
_secret = b""  # without `protect` anybody can sign and prove
_held: list[SignedStore] = []  # groups hold the C++ half of a store, whose methods are in the Python half


def protect(secret: str) -> None:
    """Set the secret of the run, which its ranks alone know; call this before the first group is built."""
    global _secret
    _secret = secret.encode()


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store at `host:port`, without waiting for other ranks.

    Raises torch's DistStoreError after `timeout_s`.
    """
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def torchrun_store(timeout_s: float) -> TCPStore:
    """Connect to the store of the role's ranks, which torchrun's environment names. Raises as `connect_store` does."""
    return connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout_s)


def signed(store: Store, prefix: str) -> SignedStore:
    """Return the part of `store` below `prefix`, which refuses values that no rank of this run has written."""
    return SignedStore(PrefixStore(prefix, store), hmac.digest(_secret, prefix.encode(), "sha256"))


def meet(store: Store, rank: int, world: int) -> SignedStore:
    """Return the store for a group of `world` ranks that all call this, with a secret of this one meeting.

    Every rank contributes a nonce, so values that a stranger recorded at an earlier meeting are refused. From now on
    this process proves itself in each group that it forms with gloo, and unpickles no more than `ADMITTED`.
    """
    _guard()
    numbers = signed(store, "numbers")
    numbers.set(str(rank), secrets.token_hex(_BYTES))
    own = SignedStore(store, hmac.digest(_secret, b"".join(numbers.get(str(each)) for each in range(world)), "sha256"))
    _held.append(own)
    return own


class SignedStore(Store):
    """Keep values in another store, each with an HMAC of key and value; a value without one raises StrangerError.

    Counters (`add`) are not signed: by changing them, or by deleting keys, a stranger can keep ranks from meeting, and
    do nothing more.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        super().__init__()
        self._store = store
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        return self._read(key, self._store.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        before, after = expected and self._sign(key, expected), self._sign(key, desired)
        return self._read(key, self._store.compare_set(key, before, after))

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, *([timeout] if timeout is not None else []))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> SignedStore:
        _held.append(SignedStore(self._store.clone(), self._secret))
        return _held[-1]

    def _sign(self, key: str, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256") + data

    def _read(self, key: str, found: bytes) -> bytes:
        value = found[_BYTES:]
        if not hmac.compare_digest(found, self._sign(key, value)):
            raise StrangerError(
                f"the value of {key!r} in the ranks' store was written by none of them: somebody else on the network "
                "has changed it, without the secret of this run. Put GLOO_SOCKET_IFNAME on a network that others do "
                "not reach, and take whole nodes (--exclusive)"
            )
        return value


def prove(receive: Transfer, send: Transfer, store: Store, rank: int, peers: Collection[int]) -> None:
    """Prove to each of `peers` that this process is `rank` of this run, and check their proofs. Raises StrangerError.

    Gloo believes whoever connects first and names a rank. `store` is the group's own. A proof is the HMAC of the
    group, both ranks, and the nonces of both.
    """

    def exchange(mine: dict[int, bytes]) -> dict[int, bytes]:
        theirs = {peer: bytearray(_BYTES) for peer in peers}
        views = {peer: torch.frombuffer(theirs[peer], dtype=torch.uint8) for peer in peers}
        works = [receive(views[peer], peer) for peer in peers]
        works += [send(torch.frombuffer(bytearray(mine[peer]), dtype=torch.uint8), peer) for peer in peers]
        for work in works:
            work.wait()
        return {peer: bytes(theirs[peer]) for peer in peers}

    def answer(by: int, to: int, number: bytes, challenge: bytes) -> bytes:
        return hmac.digest(_secret, b"%b %d %d %b%b" % (group, by, to, number, challenge), "sha256")

    group = store.compare_set("proof", "", secrets.token_hex(_BYTES)) if peers else b""
    mine = {peer: secrets.token_bytes(_BYTES) for peer in peers}
    theirs = exchange(mine)
    answers = exchange({peer: answer(rank, peer, mine[peer], theirs[peer]) for peer in peers})
    for peer in peers:
        if not hmac.compare_digest(answers[peer], answer(peer, rank, theirs[peer], mine[peer])):
            raise StrangerError(
                f"the process that connected to rank {rank} as rank {peer} of its process group does not know the "
                "secret of this run: it belongs to somebody else on the network. Put GLOO_SOCKET_IFNAME on a network "
                "that others do not reach, and take whole nodes (--exclusive)"
            )


def prove_all(group: Any, store: Store, rank: int, world: int) -> None:
    """Call `prove` with all other ranks of a gloo group."""
    others = set(range(world)) - {rank}
    prove(
        lambda data, peer: group.recv([data], peer, 0),
        lambda data, peer: group.send([data], peer, 0),
        store,
        rank,
        others,
    )


def _guard() -> None:
    """Have this process prove itself in all gloo groups, those of libraries too, and guard its unpickler."""
    if distributed_c10d._unpickler is AdmittedUnpickler:
        return
    distributed_c10d._unpickler = AdmittedUnpickler
    form, cpu = distributed_c10d._new_process_group_helper, torch.device("cpu")

    def form_proven(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        group, store = form(*args, **kwargs)
        if isinstance(group, ProcessGroup) and cpu in group._device_types:
            prove_all(group._get_backend(cpu), store, group.rank(), group.size())
        return group, store

    distributed_c10d._new_process_group_helper = form_proven


ADMITTED = {
    ("vllm.distributed.device_communicators.shm_broadcast", "Handle"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("_ctypes", "_unpickle"),
    ("flashinfer.comm.cuda_ipc", "cudaIpcMemHandle_t"),
}
"""Classes that vLLM's ranks pickle for each other, besides built-in types: names of shared memory, and with GPUs the
handles of their memory for vLLM's own all-reduce, as tensors or C structures."""


class AdmittedUnpickler(distributed_c10d._unpickler):
    """Read pickles that name nothing but `ADMITTED`, and tensors as weights are read. Raises StrangerError."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (torch.storage.__name__, torch.storage._load_from_bytes.__name__):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) not in ADMITTED:
            raise StrangerError(
                f"a rank was sent a pickle that asks for {module}.{name}, which no rank sends. It comes from somebody "
                "else on the network or, with a version of vLLM other than the one in sbatch/, from vLLM: report that"
            )
        return super().find_class(module, name)


def gloo_group(
    store: Store, rank: int, world: int, address: str, timeout_s: float, lazy: bool = False
) -> ProcessGroupGloo:
    """Build a gloo group outside every WORLD; the others connect to `address` of this node. Raises RuntimeError.

    `lazy`: two ranks connect at their first exchange, and the caller has to `prove` them; else all connect at once.
    """
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=lazy)]
    group = ProcessGroupGloo(store, rank, world, options)
    if not lazy:
        prove_all(group, store, rank, world)
    return group


def nccl_group(store: Store, rank: int, world: int, timeout_s: float) -> Any:
    """Build a ProcessGroupNCCL that leaves its errors to its owner. Waiting for its operations blocks the host."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with environment(OWN_ERRORS):
        return ProcessGroupNCCL(store, rank, world, options)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, and restore the earlier values after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def coalesced(group: Any, begin: Callable[[], None]) -> list[Work]:
    """Start all operations that `begin` issues on an NCCL group as one.

    A bare ProcessGroupNCCL is a `Backend`: unlike those of a `ProcessGroup`, the two calls take no argument.
    """
    group._start_coalescing()
    try:
        begin()
    except BaseException:
        # NCCL counts open operations per thread. While one is open, it starts no further operation of this thread, in
        # any group, and reports all of them as completed.
        with suppress(RuntimeError):
            group._end_coalescing()
        raise
    work = group._end_coalescing()
    return [work] if work is not None else []


def all_gather(group: Any, whole: Tensor, mine: Tensor) -> Work:
    """Start an all-gather: `whole` becomes every rank's `mine`, in the order of the ranks."""
    work: Work = group._allgather_base(whole, mine)
    return work


def share_gpu_memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return the fields by which another process maps the tensor's memory: the GPU's number here, and seven more."""
    return tuple(tensor.untyped_storage()._share_cuda_())


def open_gpu_memory(ordinal: int, fields: Sequence[Any]) -> Tensor:
    """Map memory that another process shares, uint8 [n], on the GPU that is number `ordinal` in this process."""
    storage = torch.UntypedStorage._new_shared_cuda(ordinal, *fields[1:])
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
