"""Examine a node: collect its facts, try to reach others, measure links and groups.

Where the conductor cannot be reached the facts are printed, so that the launcher brings them.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.errors import CallTimeout, PlacementError, RoleDied
from slurm_rlhf.nodes.collect import collect
from slurm_rlhf.nodes.facts import Introduction, NodeFacts, Orders, Reach
from slurm_rlhf.nodes.group_host import GroupHost
from slurm_rlhf.nodes.link_test import Answerer, measure
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import ControlClient

_PROBES = 16  # connections that are tried at a time
_BACKLOG = 4096


class Examiner:
    """Is the agent of a node before a run: it looks at the node, and takes part in measurements."""

    def __init__(self, orders: Orders, node: str, environ: Mapping[str, str]) -> None:
        self._orders = orders
        self._node = node
        self._environ = environ
        self._secret = RunKeys.parse(orders.keys, "the agent's orders").client_secret
        self._host = GroupHost() if orders.groups else None  # before there are threads

    def close(self) -> None:
        """End what it has started."""
        if self._host is not None:
            self._host.end()

    def serve(self) -> None:
        """Do what the conductor asks until it says goodbye, or print the facts where it cannot be reached."""
        orders, facts = self._orders, partial(collect, self._orders, self._node, self._environ)
        try:
            own = address_towards(orders.address)
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            links, store = (socket.create_server((own, 0), family=family, backlog=_BACKLOG) for _ in range(2))
        except (OSError, PlacementError) as error:
            cause = error.__cause__ or error
            _print_facts(facts(), getattr(cause, "strerror", None) or str(cause))
            return
        Answerer(links, self._secret, orders.limit_s)
        ports = links.getsockname()[1], store.getsockname()[1]
        introduce = {"introduce": lambda: Introduction(own, *ports, time.time())}
        with client_of(orders, self._node, self._node, introduce) as client, suppress(RoleDied):
            known = facts()
            if problem := _absence(client, orders):
                _print_facts(known, problem)
                return
            while (request := client.receive()) is not None:
                match request.method:
                    case "facts":
                        reached = reach(request.argument(dict[str, int]), orders.connect_s)
                        request.reply(replace(known, reached=reached))
                    case "link":
                        request.reply(self._measured(*request.argument(tuple[str, int])))
                    case "groups":
                        self._take_part(request.argument(dict[str, Any]), store, client)
                        request.reply()

    def _measured(self, address: str, port: int) -> dict[str, Any]:
        try:
            return measure(address, port, self._secret, self._orders.limit_s / 4)
        except OSError as error:
            return {"error": error.strerror or str(error)}

    def _take_part(self, order: dict[str, Any], store: socket.socket, client: ControlClient) -> None:
        assert self._host is not None, "the orders said nothing of groups"
        for report in self._host.run({**order, "secret": self._secret}, store, self._environ):
            client.event("group", **report)


def client_of(
    orders: Orders,
    name: str,
    node: str,
    threaded: Mapping[str, Callable[[], Any]] | None = None,
    rank: int = 0,
    world: int = 1,
) -> ControlClient:
    """Begin to connect an agent to the conductor, which knows it by `name` and `rank`."""
    return ControlClient(
        f"tcp://{orders.address}:{orders.port}",
        RunKeys.parse(orders.keys, "the agent's orders"),
        name,
        rank,
        world,
        host=node,
        heartbeat_interval=orders.beat_s,
        heartbeat_limit=orders.silent_s,
        threaded=threaded,
    )


def _absence(client: ControlClient, orders: Orders) -> str:
    """Say why the conductor cannot be reached; empty: it was. Raises RoleDied when it has gone."""
    said = ""
    for patience_s in (orders.connect_s, orders.limit_s):
        try:
            client.connect(patience_s)
            return ""
        except CallTimeout as error:
            said = str(error)
        try:
            socket.create_connection((orders.address, orders.port), orders.connect_s).close()
        except OSError as error:
            return error.strerror or str(error)
    return said  # it is there, and does not answer


def _print_facts(facts: NodeFacts, problem: str) -> None:
    print(json.dumps({"facts": asdict(replace(facts, conductor=problem))}), flush=True)


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
