"""Run one step of the job: which nodes a role gets, its `srun` command line, the container around it, the child."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_rlhf.cluster.processes import exit_text
from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.config.schema import Config
from slurm_rlhf.nodes.child_process import start_child
from slurm_rlhf.nodes.facts import WORKERS
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU, Topology
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

AGENT = "slurm_rlhf.nodes.agent"
"""Module of the task of every step."""

SLURM_OPTIONS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("slurm.toml").read_text(encoding="utf-8")
)
"""Tables of `slurm.toml`."""
STEP_VARIABLES = frozenset(
    f"{prefix.upper()}_{name}" for prefix, names in SLURM_OPTIONS["step"].items() for name in names.split()
)
"""Variables that srun would read as options of the step."""

_TASK_ENDED = re.compile(r"^srun: error: (?P<nodes>[^\s:]+): tasks? [\d,-]+: (?P<how>.+)$", re.MULTILINE)
PASSING_FAILURES = ("Unable to contact slurm controller", "Communication connection failure")
"""Texts of failures that another attempt may not meet, as of a Slurm controller that is restarting."""


@dataclass(frozen=True, slots=True)
class Step:
    """Describe a step: one task on each of `nodes`, shared with the other steps of the job.

    `cpus` on each node; 0: left to Slurm. `gpus` on each node, in the same order; empty: none. `uneven`: the nodes of
    the job have different numbers of GPUs. `output` may hold patterns of srun; empty: the output of srun itself.
    `together`: the tasks are useless without each other, so a node that dies ends the step. `options`: more options.
    """

    name: str
    nodes: tuple[str, ...]
    cpus: int = 0
    gpus: tuple[int, ...] = ()
    output: str = ""
    together: bool = True
    uneven: bool = False
    options: tuple[str, ...] = ()


def step_command(step: Step, command: list[str]) -> list[str]:
    """Return the command line of the step. Its tasks run `command` in the environment of srun.

    Without --overlap and --mem=0 the second step would wait for the first, and roles that wait for each other would
    never start. --nodes and --ntasks are both needed: --nodelist alone means every node of the job.

    In a job with different numbers of GPUs a step that asks for none fails, --gres=gpu:N is refused on the larger
    nodes, and --gpus=N over several nodes is divided in an arbitrary way (Slurm 22.05): each node gets a component.
    """
    if not step.uneven or not step.gpus:
        resources = f"--gres=gpu:{step.gpus[0]}" if step.gpus else "--gres=none"
        return ["srun", *_component(step, step.nodes, resources, command)]
    words: list[str] = []
    for node, gpus in zip(step.nodes, step.gpus, strict=True):
        words += [
            ":" if words else "srun",
            *_component(step, (node,), f"--gpus={gpus}" if gpus else "--gres=none", command),
        ]
    return words


def _component(step: Step, nodes: tuple[str, ...], resources: str, command: list[str]) -> list[str]:
    count = len(nodes)
    return [
        f"--job-name={step.name}",
        "--overlap",
        "--mem=0",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        *([f"--cpus-per-task={step.cpus}"] if step.cpus else []),
        resources,
        "--kill-on-bad-exit=0",
        *([] if step.together else ["--no-kill"]),
        "--wait=0",
        "--input=none",
        "--mpi=none",
        "--export=ALL",
        *([f"--output={step.output}", "--open-mode=append"] if step.output else []),
        *step.options,
        *command,
    ]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy `environ` for srun without what would change the step that its command line describes."""
    return {name: value for name, value in environ.items() if name not in STEP_VARIABLES}


class RunningStep:
    """Runs a step, whose tasks are agents. `log` takes the output of `command`; that of tasks goes to `step.output`."""

    def __init__(self, step: Step, command: list[str], log: Path) -> None:
        """`command`: that of srun, or without Slurm the one task."""
        self.step = step
        self.log = log
        self.variables: Mapping[str, str] = {}
        """Variables of its tasks, from the next start on."""
        self._command = command
        self._size = 0  # bytes of the log before the start
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again. It ends with the thread that calls this."""
        self._size = self.log.stat().st_size if self.log.exists() else 0
        environment = {**step_environment(os.environ), **self.variables}
        # SIGTERM makes srun end its tasks. Killed outright, it would leave them to the end of the job.
        self._process = start_child(self._command, self.log, environment, signal.SIGTERM)

    @property
    def code(self) -> int | None:
        """Return the exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        """Tell whether it was started, and has not ended."""
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        """Return what it has printed since its start."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._size)
                return file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    def signal(self, number: signal.Signals) -> None:
        """Signal it if it still runs: SIGTERM makes srun kill its tasks."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def failures(self, code: int | None) -> list[tuple[str, str]]:
        """Return (nodes, how) of the tasks that failed, in order, or of the command, which ended with `code`.

        Empty while all is well. `code`: None if it had not ended when the caller looked.
        """
        found = [(match["nodes"], f"ended: {match['how']}") for match in _TASK_ENDED.finditer(self.said())]
        if found or code is None:
            return found
        return [(",".join(self.step.nodes), f"ended ({Path(self._command[0]).name} {exit_text(code)})")]


def wait_over(steps: Sequence[RunningStep], seconds: float) -> None:
    """Wait until all are over, for `seconds` at most."""
    wait_until(lambda: not any(each.alive for each in steps), seconds, 0.05, 0.05)


def end(steps: Sequence[RunningStep]) -> None:
    """End what still runs, within seconds.

    Steps that SIGTERM does not end have a node that does not answer: the end of the batch step ends the rest, and srun
    itself would wait for SlurmdTimeout.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in steps:
            each.signal(number)
        wait_over(steps, timeouts.STEP_KILL_S)


PYXIS = "pyxis"


@dataclass(frozen=True, slots=True)
class Container:
    """Say where Python runs on the nodes: by default outside any container, with the conductor's own interpreter."""

    image: str = ""
    runtime: str = ""  # apptainer, singularity, pyxis
    mounts: tuple[str, ...] = ()  # host path, or host path:path inside
    python: str = sys.executable

    def command(self, module: str, *arguments: str, gpus: bool) -> list[str]:
        """Return the command that runs `module` on a node; `gpus`: make them visible in the container."""
        inner = [self.python, "-m", module, *arguments]
        if self.runtime in ("", PYXIS):
            return inner
        binds = [f"--bind={mount}" for mount in self.mounts]
        return [self.runtime, "exec", *(["--nv"] if gpus else []), *binds, self.image, *inner]

    def step_options(self) -> tuple[str, ...]:
        """Return the options of srun itself: pyxis is a plugin of it, which makes GPUs visible by itself."""
        if self.runtime != PYXIS:
            return ()
        mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in self.mounts)
        return (f"--container-image={self.image}", f"--container-mounts={mounts}")


HOST = Container()


def container_of(config: Config) -> Container:
    """Read the keys `slurm.container...`. Mounts the run directory, the models and what the user adds."""
    slurm = config.slurm
    if not slurm.container:
        return HOST
    own = [config.run_dir, *(get(config, name) for name in all_keys() if name.endswith(".model_name_or_path"))]
    mounts = tuple(dict.fromkeys([*filter(None, own), *slurm.container_mounts]))
    return Container(slurm.container, slurm.container_runtime, mounts, slurm.container_python)


def nodes_step(topology: Topology, container: Container = HOST) -> Step:
    """Return the step with an agent on each node of the job, which is no role."""
    step = workers_step(topology, [node.name for node in topology.nodes], Path(), container)
    return replace(step, name="nodes", cpus=0, output="")


def role_step(
    ranks: RankMap, role: str, logs: Path, container: Container = HOST, only: Sequence[str] | None = None
) -> Step:
    """Return the step of `role`, on all of its nodes or on those in `only`.

    Engines never span nodes: the tasks of rollout do not know of each other, and the others survive when one ends.
    """
    places = [share.node for share in ranks.roles[role] if only is None or share.node in only]
    step = workers_step(ranks.topology, places, logs, container)
    output = str(logs / f"{role}.%N.torchrun.log")
    return replace(step, name=role, output=output, together=ROLES[role].kind != "engine")


def workers_step(topology: Topology, names: Sequence[str], logs: Path, container: Container = HOST) -> Step:
    """Return the step with workers on the nodes `names`."""
    nodes = [topology.node(name) for name in names]
    return Step(
        name=WORKERS,
        nodes=tuple(names),
        cpus=min(node.cpus for node in nodes),
        # All that the job has there: agents choose among them, and NCCL needs to see the neighbours.
        gpus=tuple(node.gpus for node in nodes) if topology.accelerator == GPU else (),
        output=str(logs / f"{WORKERS}.%N.log"),
        together=False,
        uneven=len({node.gpus for node in topology.nodes}) > 1,
        options=container.step_options(),
    )
