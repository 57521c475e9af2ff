"""What relays could reach: bytes over chains of nodes, one TCP stream from each to the next, and nothing else."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Thread

from shaped_links import Links

_PORT = 7000
_PIECE = 1 << 20


def seconds(links: Links, chains: Sequence[Sequence[str]], nbytes: int, rounds: int) -> list[float]:
    """Send `nbytes` along each chain of nodes, all at a time; return how long each round took, the first left out."""
    spec = {"chains": [[links.address(node) for node in chain] for chain in chains], "nbytes": nbytes}
    found = []
    with ExitStack() as stack:
        nodes = []
        for node in sorted({node for chain in chains for node in chain}):
            words = [*links.inside(node), sys.executable, __file__, json.dumps(spec), links.address(node)]
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            nodes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for _ in range(rounds + 3):  # two to listen and to connect, one for fresh connections
            started = time.monotonic()
            for process in nodes:
                process.stdin.write("go\n")
            assert all(process.stdout.readline() for process in nodes), "a node of a chain has ended"
            found.append(time.monotonic() - started)
    return found[3:]


class Node:
    """One node of some chains."""

    def __init__(self, chains: list[list[str]], nbytes: int, own: str) -> None:
        self._own, self._nbytes = own, nbytes
        self._chains = {place: chain for place, chain in enumerate(chains) if own in chain}
        self._from: dict[int, socket.socket] = {}
        self._to: dict[int, socket.socket] = {}

    def listen(self) -> None:
        for place, chain in self._chains.items():
            if chain[0] != self._own:
                self._from[place] = socket.create_server((self._own, _PORT + place))

    def connect(self) -> None:
        for place, chain in self._chains.items():
            if chain[-1] != self._own:
                self._to[place] = socket.create_connection((chain[chain.index(self._own) + 1], _PORT + place))
        self._from = {place: server.accept()[0] for place, server in self._from.items()}

    def hand_on(self) -> None:
        threads = [Thread(target=self._along, args=(place,)) for place in self._chains]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _along(self, place: int) -> None:
        room, left = memoryview(bytearray(_PIECE)), self._nbytes
        while left:
            got = min(left, _PIECE)
            if place in self._from:
                got = self._from[place].recv_into(room[:got])
                assert got, "the node before has ended"
            if place in self._to:
                self._to[place].sendall(room[:got])
            left -= got


def main() -> None:
    node = Node(**json.loads(sys.argv[1]), own=sys.argv[2])
    steps = [node.listen, node.connect]
    for _ in sys.stdin:
        (steps.pop(0) if steps else node.hand_on)()
        print("done", flush=True)


if __name__ == "__main__":
    main()
