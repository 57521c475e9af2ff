"""vLLM's asynchronous scheduling on a CPU: its own scheduler, batch queue and model runner, two batches in flight.

The CPU build switches it off, and needs of CUDA no more than a stream and an event to be switched on again.
Run as a program this is a rank of the rollout role whose engine has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Event:
    """`torch.cuda.Event`, of a device that has done everything at once."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """`torch.cuda.Stream`, likewise."""

    def wait_stream(self, stream: Any) -> None: ...


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    yield


def switch_on() -> Callable[[], None]:
    """For every engine that this process makes, until what this returns is called."""
    import torch

    from slurm_rlhf.engine import vllm as backend

    usual = backend.engine_config

    def asynchronous(config: Any) -> Any:
        made = usual(config)
        made.scheduler_config.async_scheduling = True
        return made

    backend.engine_config = asynchronous
    ours = {"Event": Event, "Stream": Stream, "current_stream": lambda device=None: Stream(), "stream": _on}
    theirs = {name: getattr(torch.cuda, name) for name in ours}
    for name, value in ours.items():
        setattr(torch.cuda, name, value)

    def off() -> None:
        backend.engine_config = usual
        for name, value in theirs.items():
            setattr(torch.cuda, name, value)

    return off


if __name__ == "__main__":
    from slurm_rlhf.ranks import rank_process as worker

    switch_on()
    worker.main()
