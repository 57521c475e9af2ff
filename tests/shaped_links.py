"""Nodes with links of a known rate: network namespaces on a bridge, limited in both directions. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def available() -> bool:
    return os.geteuid() == 0 and all(shutil.which(program) for program in ("ip", "tc", "nsenter"))


class Links:
    """The namespaces of some nodes; `Links.made` cleans up in all cases."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._tag = f"sy{os.getpid() % 100000}"
        self.nodes = list(nodes)

    def address(self, node: str) -> str:
        return f"10.97.{os.getpid() % 250}.{10 + self.nodes.index(node)}"

    def inside(self, node: str) -> list[str]:
        """The beginning of a command that is to run on a node."""
        return ["nsenter", f"--net=/run/netns/{self._name(node)}"]

    def second(self, node: str, subnet: int) -> str:
        """Another interface, ib0, in a network of its own; returns its address."""
        address = f"10.98.{subnet}.1"
        _run(*self.inside(node), "ip", "link", "add", "ib0", "type", "dummy")
        _run(*self.inside(node), "ip", "addr", "add", f"{address}/24", "dev", "ib0")
        _run(*self.inside(node), "ip", "link", "set", "ib0", "up")
        return address

    def cut(self, node: str) -> None:
        """Unplug the node."""
        _run(*self.inside(node), "ip", "link", "set", "eth0", "down")

    def make(self, rate: str) -> None:
        _run("ip", "link", "add", f"{self._tag}br", "type", "bridge")
        _run("ip", "link", "set", f"{self._tag}br", "up")
        shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
        for node in self.nodes:
            space, outer = self._name(node), f"{self._tag}v{self.nodes.index(node)}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", outer, "master", f"{self._tag}br", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", link, "up")
            _run("tc", "qdisc", "add", "dev", outer, *shape)
            _run(*self.inside(node), "tc", "qdisc", "add", "dev", "eth0", *shape)

    def remove(self) -> None:
        for index, node in enumerate(self.nodes):
            _run("ip", "link", "del", f"{self._tag}v{index}", check=False)
            _run("ip", "netns", "del", self._name(node), check=False)
        _run("ip", "link", "del", f"{self._tag}br", check=False)

    def _name(self, node: str) -> str:
        return f"{self._tag}-{node}"


@contextmanager
def shaped(nodes: Sequence[str], rate: str) -> Iterator[Links]:
    """Nodes that exist as long as the block; `rate` in tc's words, as in 400mbit."""
    links = Links(nodes)
    try:
        links.make(rate)
        yield links
    finally:
        links.remove()


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
