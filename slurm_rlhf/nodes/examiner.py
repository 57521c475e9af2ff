"""Be the agent of one node: `python -m slurm_rlhf.nodes.examiner`, started on each by srun, MPI or the conductor.

It reports to the conductor's desk. Where it cannot reach that it prints its facts, so that the launcher brings them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import IO, Any

from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.nodes.collect import collect
from slurm_rlhf.nodes.desk import encode, proof
from slurm_rlhf.nodes.facts import Orders, Reach
from slurm_rlhf.nodes.group_host import GroupHost
from slurm_rlhf.nodes.link_test import Answerer, measure

_PROBES = 16  # connections that are tried at a time
_BACKLOG = 4096


def main() -> None:
    orders = Orders.from_environment(os.environ)
    signal.alarm(int(orders.limit_s) + 5)  # whatever happens: no agent is left behind
    node = node_name()
    host = GroupHost() if orders.groups else None
    try:
        serve(orders, node, host, os.environ)
    finally:
        if host is not None:
            host.end()


def serve(orders: Orders, node: str, host: GroupHost | None, environ: Mapping[str, str]) -> None:
    """Report, and do what the desk asks until it hangs up."""
    line, listening, problem = None, None, ""
    try:
        line = _Line(orders)
        links, listening = (
            socket.create_server((line.own_address, 0), family=line.family, backlog=_BACKLOG) for _ in range(2)
        )
        Answerer(links, orders.secret, orders.limit_s)
        line.introduce(orders.secret, node, links.getsockname()[1], listening.getsockname()[1])
    except (OSError, ValueError) as error:
        line, problem = None, getattr(error, "strerror", None) or str(error)
    facts = replace(collect(orders, node, environ), conductor=problem)
    if line is None or listening is None:
        print(json.dumps({"facts": asdict(facts)}), flush=True)
        return
    while (order := line.receive()) is not None:
        if "peers" in order:
            reached = reach(order["peers"], orders.connect_s)
            line.send({"facts": asdict(replace(facts, reached=reached))})
        elif "link" in order:
            line.send({"group": {**order["report"], **_measured(orders, *order["link"])}})
            line.send({"done": order["name"]})
        elif "stages" in order:
            order["secret"] = orders.secret
            told = host.run(order, listening, environ) if host is not None else iter([{"error": "not asked for"}])
            for report in told:
                line.send({"group": report})
            line.send({"done": order["name"]})


def _measured(orders: Orders, address: str, port: int) -> dict[str, Any]:
    try:
        return measure(address, port, orders.secret, orders.limit_s / 4)
    except (OSError, ValueError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}


def reach(peers: Mapping[str, int], timeout_s: float) -> tuple[Reach, ...]:
    """Connect to other nodes by their names; `peers`: node -> port at which its agent listens."""
    if not peers:
        return ()
    with ThreadPoolExecutor(min(_PROBES, len(peers))) as threads:
        return tuple(threads.map(lambda node: _reach(node, peers[node], timeout_s), peers))


def _reach(node: str, port: int, timeout_s: float) -> Reach:
    try:
        found = socket.getaddrinfo(node, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Reach(node, "", "", error.strerror or str(error))
    address = str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
    try:
        name = socket.gethostbyaddr(address)[0]
    except OSError:
        name = ""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except ConnectionRefusedError:
        pass  # an answer: the node is there, and its agent listens on another of its addresses
    except OSError as error:
        return Reach(node, address, name, error.strerror or str(error))
    return Reach(node, address, name, "")


class _Line:
    """Talk to the desk. Raises OSError while it is made if the desk cannot be reached."""

    def __init__(self, orders: Orders) -> None:
        self._socket = socket.create_connection((orders.address, orders.port), orders.connect_s)
        self._socket.settimeout(orders.limit_s)
        self._reader: IO[bytes] = self._socket.makefile("rb")
        self.family = self._socket.family
        self.own_address = str(self._socket.getsockname()[0])

    def introduce(self, secret: str, node: str, port: int, store_port: int) -> None:
        """Prove that this is no stranger; say at which ports the other nodes, and a store's clients, reach this one."""
        number = str(json.loads(self._reader.readline())["number"])
        answer = {"node": node, "proof": proof(secret, number, node), "clock": time.time()}
        self.send({**answer, "address": self.own_address, "port": port, "store": store_port})

    def send(self, message: Any) -> None:
        self._socket.sendall(encode(message))

    def receive(self) -> dict[str, Any] | None:
        """Return the next order; None when the desk is closed or silent."""
        try:
            line = self._reader.readline()
            return dict(json.loads(line)) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)  # the conductor has what it wanted
