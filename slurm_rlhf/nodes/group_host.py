"""Keep a process ready that has imported torch, and let it start the processes of a node for the collectives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from slurm_rlhf.cluster.network import address_of, is_loopback
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.nodes.environment import visible_gpus, without_injected
from slurm_rlhf.placement.topology import Node, Topology
from slurm_rlhf.wire import timeouts

_MESSAGE = 1 << 20


class GroupHost:
    """Start `group_rank` on this node; importing torch takes seconds, in which other checks go on."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slurm_rlhf.nodes.group_rank", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**without_injected(os.environ), **one_thread},
        )
        theirs.close()
        self._socket = ours

    def run(
        self, order: Mapping[str, Any], listening: socket.socket, environ: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """Let the seats of `order` go through their stages; yield their reports until all have ended.

        `listening`: where the store of the group listens if this node has it.
        """
        address = str(listening.getsockname()[0])
        interface = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if interface and not is_loopback(address):
            try:
                address = address_of(interface, "GLOO_SOCKET_IFNAME")
            except ConfigError as error:
                yield from self._all(order, str(error))
                return
        self._socket.settimeout(order["limit_s"] + timeouts.PREFLIGHT_S)
        place = Topology((Node(order["node"], order["gpus"], 0, tuple(order["devices"])),), order["accelerator"])
        seats = [[seat, slot, visible_gpus(place, order["node"], [slot], environ)] for seat, slot in order["seats"]]
        message = json.dumps({**order, "seats": seats, "address": address}).encode()
        try:
            socket.send_fds(self._socket, [message], [listening.fileno()])
            while (said := self._socket.recv(_MESSAGE)) and (report := json.loads(said)) != {"end": True}:
                yield report
            if not said:
                yield from self._all(order, f"the process that imports torch has ended: {self._last_words()}")
        except OSError as error:
            yield from self._all(order, f"the process that imports torch says nothing: {error.strerror or error}")

    def end(self) -> None:
        """End the process and what it started."""
        self._socket.close()
        self._process.kill()  # its seats go with it
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"

    @staticmethod
    def _all(order: Mapping[str, Any], error: str) -> Iterator[dict[str, Any]]:
        """Report the same error of every seat in every group."""
        mine = {seat for seat, _ in order["seats"]}
        for stage in order["stages"]:
            for name, seats in stage:
                for seat in mine.intersection(seats):
                    yield {"seat": seat, "group": name, "error": error}
