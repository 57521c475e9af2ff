"""Agents of steps that a test plays itself: its `srun` is a script that writes down what they would get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from control_peer import received
from programs import write_program
from waiting import HANG_S

from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.nodes.agent import client_of
from slurm_rlhf.nodes.facts import NODES, VARIABLE, Orders
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.messages import Request

WRITE_ORDERS = f'echo "${VARIABLE}" >$orders.new && mv $orders.new $orders\n'


def allocation(*nodes: str) -> SlurmEnvironment:
    """A job on these nodes, as its first one sees it."""
    found = read_slurm(
        {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": ",".join(nodes),
            "SLURM_JOB_NUM_NODES": str(len(nodes)),
            "SLURMD_NODENAME": nodes[0],
        }
    )
    assert found is not None
    return found


class PlayedSrun:
    """A directory with a run and with a `srun` that is a shell script of the test."""

    def __init__(self, root: Path) -> None:
        self.root, self.run_dir = root, root / "run"

    def srun(self, script: str) -> None:
        """Each start adds its words to `$logs/starts` and runs the script."""
        begin = f"#!/bin/bash\nlogs={self.run_dir}/logs\norders=$logs/orders\n{WRITE_ORDERS}"
        write_program(self.root / "bin" / "srun", f"{begin}echo $* >>$logs/starts\n{script}\n")

    @property
    def starts(self) -> list[str]:
        file = self.run_dir / "logs" / "starts"
        return file.read_text().splitlines() if file.exists() else []

    def agent(self, node: str) -> PlayedAgent:
        """The agent of a node in the step that was started last."""
        return PlayedAgent(self.run_dir / "logs" / "orders", node)


class PlayedAgent:
    """The agent of a node in the step whose orders are in a file."""

    def __init__(self, orders: Path, node: str) -> None:
        read = Orders.from_environment({VARIABLE: orders.read_text(encoding="utf-8")})
        self.step = read.step
        self.client: ControlClient = client_of(read, f"{read.step or NODES} {node}", node)
        self.client.connect(HANG_S)
        self.client.event("here")

    def asked(self, method: str, declared: Any = Any) -> tuple[Request, Any]:
        """The next call, which is one of `method`, and its argument."""
        request = received(self.client)
        assert request.method == method
        return request, request.argument(declared) if declared is not None else None

    def started(self, store: str = "") -> Any:
        """Answer the request to start, and return the fields of its `StepSpec`."""
        request, (spec, _) = self.asked("start")
        request.reply(store)
        return spec

    def ended(self, how: str, engine: int | None = None) -> None:
        self.client.event("ended", role="", engine=engine, how=how)
