"""A receiver in a process of its own, for the tests of sync/: JSON commands on stdin, JSON answers on stdout."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from kit_gpus import device, gpu_environment, visible
from msgspec.structs import asdict
from waiting import HANG_S
from warm_runs import WarmProgram

ROOT = Path(__file__).parents[2]


class Peer:
    """The test's handle of such a process."""

    numbers = count(1)  # the test's own process is rank 0

    def __init__(self, prefix: Sequence[str] = (), host: str = "", warm: bool = True) -> None:
        """`prefix`: of its command; `host`: what it takes for the name of its node; `warm`: forked with torch imported,
        where it has neither a prefix nor a GPU."""
        command = [*prefix, sys.executable, "-u", __file__, host]
        environment = {
            **os.environ,
            **gpu_environment(next(self.numbers)),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.process: Any
        if prefix or visible() or not warm:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            pipes["stderr"] = None if visible() else subprocess.DEVNULL  # the kit keeps a log
            self.process = subprocess.Popen(command, text=True, env=environment, **pipes)
        else:
            self.process = WarmProgram(command, environment)
        self.tell("warm_up")

    def wait_warm(self) -> None:
        assert self.answer() == self.pid

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, command: str, **args: Any) -> None:
        self.process.stdin.write(json.dumps([command, args]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next answer. An exception there is {"error": type, "message": text}."""
        return json.loads(self.process.stdout.readline())

    def fit(self) -> bool:
        """Whether it is alive and has nothing left to say."""
        if self.process.poll() is not None:
            return False
        self.tell("warm_up")
        ready, _, _ = select.select([self.process.stdout], [], [], 5.0)
        return bool(ready) and bool(self.answer() == self.pid)

    def leave(self) -> None:
        """Nothing more is asked of it."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(HANG_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def digest(tensor: Any) -> str:
    """Hash a tensor's dtype, shape and bytes."""
    import torch

    raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha1(f"{tensor.dtype}{list(tensor.shape)}".encode() + raw).hexdigest()


def make_weights(seed: int, layers: int = 12) -> list[tuple[str, Any]]:
    """About 1 MB per layer; fp32, bf16 and fp16, large and small; the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = [("embed", torch.randn(512, 256, generator=generator))]
    for layer in range(layers):
        weights.append((f"{layer}.weight", torch.randn(500, 501, generator=generator)))
        weights.append((f"{layer}.half", torch.randn(77, generator=generator).bfloat16()))
        weights.append((f"{layer}.other", torch.randn(3, 5, generator=generator).half()))
    return weights


def _device() -> Any:
    """Return the device on which a rank has its weights: its GPU, if it has one."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def describe(weights: list[tuple[str, Any]]) -> list[list[Any]]:
    return [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in weights]


def hold(weights: list[tuple[str, Any]], rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Cut out the part of `weights` that a rank of a ZeRO-3 world has; in a world of one: all."""
    held = {}
    for name, tensor in weights:
        flat = tensor.reshape(-1).to(device())
        step = -(-flat.numel() // world)
        first = min(rank * step, flat.numel())
        held[name] = (first, flat[first : first + step].to(_device()))
    return held


def configure(settings: dict[str, Any]) -> Any:
    from slurm_rlhf.config.keys import put
    from slurm_rlhf.config.schema import Config

    config = Config()
    for name, value in settings.items():
        put(config, name, value)
    return config


class _Engine:
    def __init__(self) -> None:
        self.group: Any = None
        self.act = ""
        self.loaded: dict[str, str] = {}
        self.sender: Any = None
        self.receiver: Any = None
        self.cuda: Any = None

    def warm_up(self) -> int:
        """Import what the other commands use: that takes seconds, which the tests' time-outs must not contain."""
        import slurm_rlhf.weights.ends  # noqa: F401

        return os.getpid()

    def join(self, **where: Any) -> list[str]:
        from slurm_rlhf.weights.group import join
        from slurm_rlhf.weights.rendezvous import Membership

        self.group = join(Membership(**where))
        return [str(member) for member in self.group.members]

    def die_connecting(self) -> None:
        """The next time that it is about to connect to the other members of a group."""
        import slurm_rlhf.weights.group as module

        module.GlooTransport = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[misc,assignment]

    def receiver_of(self, parameters: Any, bucket: int, zero: int = 0, expected: Any = None) -> int:
        from slurm_rlhf.weights.ends import Receiver
        from slurm_rlhf.weights.transfer_plan import make_plan

        plan = make_plan(parameters, bucket, self.group.layout(zero))
        self.receiver = Receiver(self.group, plan, expected)
        return len(self.receiver.plan.buckets)

    def sender_of(self, parameters: Any, bucket: int, zero: int = 0) -> int:
        from slurm_rlhf.weights.ends import Sender
        from slurm_rlhf.weights.transfer_plan import make_plan

        self.sender = Sender(self.group, make_plan(parameters, bucket, self.group.layout(zero)))
        return len(self.sender.plan.buckets)

    def push(self, version: int, seed: int, layers: int = 12, seconds: float = 0.0) -> dict[str, Any]:
        """Be an actor rank. With `seconds`: a pause before each piece."""

        zero = self.sender.plan.layout.zero_stage == 3
        world = self.group.actors if zero else 1
        import slurm_rlhf.weights.ends as module

        fill = module.fill
        held = hold(make_weights(seed, layers), self.group.rank if zero else 0, world)
        try:
            module.fill = lambda *args: (time.sleep(seconds), fill(*args))[1]
            return asdict(self.sender.push(held, version))
        finally:
            module.fill = fill

    def update(self, version: int, at: int = -1, act: str = "", seconds: float = 0.0, path: str = "") -> dict[str, str]:
        """Load an update: keep the tensors that come, as vLLM's layerwise reload does, of an even version copies.

        After `at` parameters: raise, die, freeze, leave, abort or tell (by making a file). Sleeps `seconds` per
        parameter, or at the one of `at`, if it is to be slow."""
        kept = {}
        with self.receiver.update(version) as weights:
            for number, (name, tensor) in enumerate(weights):
                if number == at and act == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == at and act == "freeze":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if number == at and act == "raise":
                    raise ValueError("no room for this layer")
                if number == at and act == "tell":
                    Path(path).touch()
                if number == at and act == "leave":
                    break
                if number == at and act == "abort":
                    threading.Timer(0.2, lambda: self.group.abort("asked by the conductor")).start()
                kept[name] = tensor if version % 2 else tensor.clone()
                if act != "slow" or number == at:
                    time.sleep(seconds)
        return {name: digest(tensor) for name, tensor in kept.items()}

    def listen(self) -> int:
        from slurm_rlhf.weights.rendezvous import listen

        self.store = listen("127.0.0.1", timeout_s=HANG_S)
        return self.store.port

    def leave(self) -> None:
        self.group.close()

    def see(self, gpus: list[str], current: int) -> None:
        """Be a rank with stand-ins for GPUs, see gpu_standins.py."""
        import torch
        from gpu_standins import FakeCuda

        if self.cuda is None:
            self.cuda = FakeCuda(gpus).install()
        self.cuda.see(gpus)
        torch.cuda.set_device(current)
        self._forget()

    def _forget(self) -> None:
        import torch

        self.cuda.syncs.clear()
        self.cuda.mapped.clear()
        torch.distributed.ProcessGroupNCCL.made.clear()

    def seen(self) -> dict[str, Any]:
        """Report what was done with the stand-ins since the last question."""
        import torch

        groups = torch.distributed.ProcessGroupNCCL.made
        found = {
            "syncs": dict(self.cuda.syncs),
            "mapped": list(self.cuda.mapped),
            "connected": [group._is_initialized() for group in groups],
            "sizes": [group.size() for group in groups],
            "peak": self.receiver.backend.pool.peak if self.receiver else self.sender.peak if self.sender else 0,
        }
        self._forget()
        return found

    def break_link(self, times: int) -> None:
        """The next exchanges over NCCL fail as they do when a link goes down."""
        self.cuda.broken_links += ["ncclSystemError: connection to a peer was lost"] * times

    def become(self, role: str, rank: int, settings: dict[str, Any]) -> None:
        """A rank of a run, for the conductor's calls below."""
        from slurm_rlhf.weights.ends import ActorEnd, EngineEnd

        self.end: Any = (ActorEnd if role == "actor" else EngineEnd)(configure(settings), f"{role} {rank}")
        self.rank = rank
        self.refusals = 0

    def found_world(self, path: str, rank: int) -> None:
        """Have the two ranks of a role in torch's own group, as a trainer has."""
        import torch.distributed

        torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)

    def sum_in_world(self, value: int) -> list[int]:
        import torch

        ours = torch.tensor([value])
        torch.distributed.all_reduce(ours)
        return [torch.distributed.get_world_size(), int(ours)]

    def sync_listen(self, host: str) -> int:
        return int(self.end.listen(host))

    def sync_join(self, parameters: Any, **group: Any) -> dict[str, Any]:
        ends_with_actors = hasattr(self.end, "push")
        if group.get("backend", "") != "gloo" and self.refusals:
            self.refusals -= 1
            group["interface"] = "none9"
        self.actors = group["actors"]
        arguments = (parameters,) if ends_with_actors else (parameters, parameters)
        return asdict(self.end.join(*arguments, **group))

    def sync_push(self, version: int) -> dict[str, Any]:
        return asdict(self.end.push(hold(make_weights(version), self.rank, self.actors), version))

    def sync_receive(self, version: int) -> dict[str, Any]:
        def load(weights: Any, version: int) -> None:
            self.loaded = {}
            for number, (name, tensor) in enumerate(weights):
                if number == 5 and self.act == "damage":
                    raise ValueError("no room for this layer")
                if number == 5 and self.act == "stop":
                    self.act = ""
                    os.kill(os.getpid(), signal.SIGSTOP)
                if number == 5 and self.act.startswith("suspend "):
                    pid, self.act = int(self.act.split()[1]), ""
                    os.kill(pid, signal.SIGSTOP)
                self.loaded[name] = digest(tensor)

        return asdict(self.end.receive(version, load))

    def will(self, act: str = "", refusals: int = 0) -> None:
        """Set what goes wrong next."""
        self.act, self.refusals = act, refusals

    def weights_loaded(self) -> dict[str, str]:
        return self.loaded


def _main() -> None:
    faulthandler.register(signal.SIGUSR2)
    if sys.argv[1:] != [""]:
        socket.gethostname = lambda: sys.argv[1]
    engine = _Engine()
    for line in sys.stdin:
        command, args = json.loads(line)
        try:
            answer = getattr(engine, command)(**args)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
