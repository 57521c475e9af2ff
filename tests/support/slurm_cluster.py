"""A real Slurm of four nodes on this machine, and whole runs as its jobs; see slurm_cluster.sh."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import HANG_S, until

SCRIPT = Path(__file__).with_name("slurm_cluster.sh")
CHECKOUT = SCRIPT.parents[2]
BASE = Path("/tmp/slurm_rlhf_cluster")
NODES = 4
PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "munge", "ip", "unshare", "nsenter")
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
COMMAND = str(CHECKOUT / ".venv" / "bin" / "slurm-rlhf")
PLACES = (
    "--actor.num_nodes=2",
    "--vllm.num_engines=2",
    "--vllm.num_nodes=2",
    "--train.threads_per_rank=1",
    "--preflight=quick",
)
"""Actor with two ranks on two nodes, critic, reference, two engines on different nodes. The links and groups of the
nodes are measured in test_slurm_preflight.py."""
SMALL = (
    *("--vllm.num_engines=1", "--vllm.num_nodes=1", "--algo.advantage.estimator=group_norm"),
    *("--algo.kl.init_coef=0", "--eval.dataset="),
)
"""Fewer processes to start, where it is not they that matter."""
ENDLESS = ("--train.max_steps=100000", "--train.num_episodes=100000")
AGENT = "slurm_rlhf.nodes.agent"
OWN = ("unshare", "slurm_cluster.sh", "slurmd", "sleep", "slurmstepd: extern")


def missing() -> str:
    """Say why this machine cannot have the cluster; empty if it can."""
    if os.geteuid() != 0:
        return "needs Slurm: only root can start its nodes"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return (
        f"needs Slurm: {', '.join(absent)} not installed (apt-get install slurm-wlm munge iproute2)" if absent else ""
    )


class Cluster:
    """The running cluster: nodes gpu001 to gpu004 of 8 GPUs, and jobs on them."""

    names = tuple(f"gpu{number:03d}" for number in range(1, NODES + 1))
    script = SCRIPT
    shared = BASE / "shared"
    """A directory that all nodes see."""

    def __init__(self) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment = {
            **clean,
            "PATH": f"{clean.get('PATH', '')}:/usr/sbin:/sbin",
            "SLURM_CONF": str(BASE / "etc" / "slurm.conf"),
            "SHARED": str(CHECKOUT),
        }

    def cluster(self, *words: str) -> str:
        """A command of slurm_cluster.sh; what it printed."""
        return self.run("bash", str(SCRIPT), *words)

    def run(self, *words: str) -> str:
        """Run a command on the login node and return what it prints. AssertionError when it fails."""
        # Daemons keep the output open: it goes to a file, and only the command itself is waited for.
        with tempfile.TemporaryFile("w+") as out:
            code = subprocess.call(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment,
                timeout=HANG_S,
            )
            out.seek(0)
            said = out.read()
        assert code == 0, f"{' '.join(words)}: {code}\n{said}"
        return said

    def sbatch(self, *words: str, cwd: Path | None = None) -> int:
        """Submit; the job's number."""
        place = [f"--chdir={cwd}"] if cwd else []
        return int(self.run("sbatch", "--parsable", *place, *words))

    def submit(self, config: Path, run_dir: Path, options: list[str], *overrides: str) -> int:
        """Submit a job that execs the conductor, as the sbatch files do."""
        script = run_dir.with_suffix(".sh")
        script.write_text(f'#!/bin/bash\nexec {COMMAND} train {config} --run_dir={run_dir} "$@"\n')
        words = ["--ntasks-per-node=1", "--open-mode=append", f"--output={run_dir}.log", *options]
        return self.sbatch(*words, str(script), *PLACES, *overrides)

    def start_soon(self, number: int) -> None:
        """Spare a requeued job the rest of Slurm's pause before it starts again (`cred_expire`).

        Not all of it: in the second in which its last credential was revoked a node refuses the next one.
        """
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now+3")

    def job(self, number: int | str) -> dict[str, str]:
        """Read the fields of `scontrol show job`: JobState, ExitCode, NodeList, ...; a task of an array is "7_0"."""
        return dict(re.findall(r"([\w/]+)=(\S*)", self.run("scontrol", "show", "job", str(number))))

    def wait_over(self, number: int | str) -> tuple[str, int]:
        """(state, exit status) of a job that has ended on every node that still answers."""
        self.wait_until(lambda: self.job(number)["JobState"] in OVER, f"the end of job {number}")
        job = self.job(number)
        return job["JobState"], int(job["ExitCode"].split(":")[0])

    def wait_until(self, ready: Callable[[], bool], what: str) -> float:
        """Seconds until `ready`; AssertionError with what the cluster was doing when it hangs."""
        start = time.monotonic()
        try:
            until(ready, what, 0.2)
        except AssertionError as hung:
            raise AssertionError(f"{hung}\n{self.state()}") from None
        return time.monotonic() - start

    def state(self) -> str:
        """Describe nodes with what runs on them, jobs that are not over, and the last lines of the last jobs."""
        jobs = re.findall(r"StdOut=(\S+)", self.run("scontrol", "show", "jobs"))
        running = [f"{node}: {line[:200]}" for node in self.names for line in self.processes(node)]
        logs = [BASE / "log" / f"{name}.log" for name in ("slurmctld", *(f"slurmd.{node}" for node in self.names))]
        ends = [f"{file}:\n{_end(file)}" for file in (*map(Path, jobs[-3:]), *logs)]
        return "\n".join([self.run("sinfo", "-N", "-l", "-p", "gpu"), self.run("squeue", "-l"), *running, *ends])

    def clear(self) -> None:
        """End every job and all that runs on the nodes: what a failed test has left is nothing to the next one."""
        for node in self.names:
            self.run("bash", "-c", f"'{SCRIPT}' crash {node} || true")  # the test may have crashed it
            self.restart(node)
        self.run("scancel", "--user=root")
        nodes = f"NodeName={','.join(self.names)}"
        self.run("scontrol", "update", nodes, "State=DOWN", "Reason=test")  # ends jobs whose end no node reported
        self.undrain(*self.names)
        whole = [f"{node} idle" for node in self.names]
        self.wait_until(
            lambda: (
                not self.run("squeue", "-h").strip()
                and self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T").split("\n")[:-1] == whole
            ),
            "end of all jobs",
        )

    def drain(self, *nodes: str) -> None:
        """Take nodes out of service: what runs there goes on, and nothing new starts."""
        self.run("scontrol", "update", f"NodeName={','.join(nodes)}", "State=DRAIN", "Reason=test")

    def undrain(self, *nodes: str) -> None:
        """Take drained nodes back into service."""
        self.run("scontrol", "update", f"NodeName={','.join(nodes)}", "State=RESUME")

    @contextmanager
    def drained(self, *nodes: str) -> Iterator[None]:
        """Drain nodes; after the block every drained node is back in service, those too that the block drained."""
        try:
            self.drain(*nodes)
            yield
        finally:
            states = [line.split() for line in self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()]
            left = {node for node, state in states if state.startswith("drain")}
            if left:
                self.undrain(*left)

    @contextmanager
    def patience(self, seconds: int) -> Iterator[None]:
        """Let a dead node count as alive for so long, in place of Slurm's five minutes."""
        self.cluster("patience", str(seconds))
        try:
            yield
        finally:
            self.cluster("patience", "300")

    def restart(self, node: str) -> None:
        """Start a crashed node again; its daemon is the last that comes up."""
        self.cluster("restart", node)
        self.wait_until(lambda: any("slurmd -D" in line for _, line in self.numbered(node)), f"start of {node}")

    def address(self, node: str) -> str:
        """A node's address in the network of the cluster."""
        return self.run("ip", "-n", f"srlhf-{node}", "-4", "-o", "addr", "show", "eth0").split("inet ")[1].split("/")[0]

    def processes(self, node: str) -> list[str]:
        """Command lines of what runs on a node but Slurm's daemon."""
        return [line for _, line in self.numbered(node) if not any(own in line for own in OWN)]

    def left(self, run_dir: Path, *nodes: str) -> list[str]:
        """Command lines of a run's processes on `nodes`."""
        return [line for node in nodes for line in self.processes(node) if str(run_dir) in line]

    def agents(self, *nodes: str) -> list[str]:
        """Command lines of agents on `nodes`; one whose ranks have left waits for slurmctld to mark a node down."""
        return [line for node in nodes for line in self.processes(node) if AGENT in line]

    def numbered(self, node: str) -> Iterator[tuple[int, str]]:
        """(process id on this machine, command line) of everything on a node."""
        for pid in self.run("ip", "netns", "pids", f"srlhf-{node}").split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            # A process that has ended but was not waited for yet has an empty command line.
            if words:
                yield int(pid), words.replace(b"\0", b" ").decode(errors="replace").strip()


def _end(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-20:]) if file.exists() else ""


def said(run_dir: Path) -> str:
    """Read what the job of a run printed."""
    return Path(f"{run_dir}.log").read_text()


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """The cluster, alone on this machine as long as the block lasts. Skips the test where it cannot be."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with open(f"{BASE}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another session of tests on this machine
        nodes = Cluster()
        nodes.cluster("start", str(NODES))
        try:
            yield nodes
        finally:
            nodes.cluster("stop")
