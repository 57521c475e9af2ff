"""Nodes with links of a known rate: network namespaces on a bridge, limited in both directions. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from waiting import HANG_S


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
        run(*self.inside(node), "ip", "link", "add", "ib0", "type", "bridge")
        run(*self.inside(node), "ip", "addr", "add", f"{address}/24", "dev", "ib0")
        run(*self.inside(node), "ip", "link", "set", "ib0", "up")
        return address

    def vanish(self, node: str) -> None:
        """Let everything from and to the node disappear, while its link looks fine at both ends."""
        run("ip", "link", "set", f"{self._tag}v{self.nodes.index(node)}", "nomaster")

    def appear(self, node: str) -> None:
        run("ip", "link", "set", f"{self._tag}v{self.nodes.index(node)}", "master", f"{self._tag}br")

    def part(self, one: str, other: str) -> None:
        """Let what two nodes send each other disappear; others reach both."""
        for here, there in ((one, other), (other, one)):
            run("ip", "-n", self._name(here), "route", "add", "blackhole", f"{self.address(there)}/32")

    def join(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            run("ip", "-n", self._name(here), "route", "del", "blackhole", f"{self.address(there)}/32")

    def make(self, rate: str) -> None:
        shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
        run("ip", "link", "add", f"{self._tag}br", "type", "bridge")
        run("ip", "link", "set", f"{self._tag}br", "up")
        for node in self.nodes:
            run("ip", "netns", "add", self._name(node))
            run("ip", "-n", self._name(node), "link", "set", "lo", "up")
            outer, space = f"{self._tag}v{self.nodes.index(node)}", self._name(node)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", outer, "master", f"{self._tag}br", "up")
            run("ip", "-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("tc", "qdisc", "add", "dev", outer, *shape)
            run(*self.inside(node), "tc", "qdisc", "add", "dev", "eth0", *shape)

    def remove(self) -> None:
        for index, node in enumerate(self.nodes):
            run("ip", "link", "del", f"{self._tag}v{index}", check=False)
            run("ip", "netns", "del", self._name(node), check=False)
        run("ip", "link", "del", f"{self._tag}br", check=False)

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


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
