"""The table of faults: what is done to which part of a run, in which phase, and what the run has to say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from slurm_rlhf.config.roles import ACTOR, REWARD

START: Final = "start"
EXPORT: Final = "export"
PHASES: Final = {
    START: ("start",),
    "generate": ("rollout",),
    "score": ("forward", "reward", "advantages"),
    "train": ("update",),
    "sync": ("sync",),
    "checkpoint": ("checkpoint",),
    EXPORT: ("export",),
}
"""Phase of a fault -> the phases that a run tells (`session.read_phase`)."""
ANY: Final = "any"
"""The phase of a fault that is not about one."""

RANKS: Final = ("actor rank 0", "actor rank 1", "critic rank 0", "reference rank 0", "rollout rank 0")
TRAINERS: Final = ("actor", "critic", "reference")
"""Roles that a torchrun starts; engines are started one by one."""
CONDUCTOR: Final = "conductor"
TWICE: Final = (("rollout rank 0", "actor rank 0"), ("actor rank 1", "critic rank 0"), ("critic rank 0", "conductor"))
"""Pairs of which the second is killed while the run deals with the end of the first."""

HURTS, BORNE, STOPS = "hurts", "borne", "stops"
"""Effects of a fault: it breaks the run, changes nothing (the run goes on as without it), ends the run in order."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Describe a fault. `says`: a regular expression that names the culprit, found in what the run tells."""

    kind: str  # SIGKILL, full disk, ...
    target: str
    phase: str
    does: str = HURTS
    says: str = ""  # {pid} stands for the process that was hit
    needs: str = ""  # "": any machine; "root": one that may mount a small disk; "slurm": one with Slurm
    apart: bool = False  # it strikes a copy of the run's directory, which is not used again
    limit_s: float = 60.0  # the fault has to be detected within this time
    each: int = 1  # ranks of a role on a node of the cluster

    @property
    def name(self) -> str:
        """Return a name that no other fault has."""
        where = "" if self.phase == ANY else f" in {self.phase}"
        place = " on a cluster" if self.needs == "slurm" else ""
        return f"{self.kind}: {self.target}{where}{place}{f', {self.each} ranks on a node' if self.each > 1 else ''}"


KILLED_S: Final = 10.0
"""Seconds in which a process that was killed has to be missed."""
NAMED_S: Final = 2.0
"""Seconds in which a cluster's killed rank has to be named, whatever the others on its node do."""


def signals() -> Iterator[Fault]:
    """Yield every signal for every process in every phase."""
    for phase in PHASES:
        for rank in RANKS:
            yield killed(rank, phase)
            yield Fault("SIGSTOP", rank, phase, says=_silent(rank, phase))
        for role in TRAINERS:
            torchrun = f"torchrun of {role}"
            yield Fault("SIGKILL", torchrun, phase, says=rf"role {role} died", limit_s=KILLED_S)
            yield Fault("SIGSTOP", torchrun, phase, does=BORNE)  # its agent continues it
        yield killed(CONDUCTOR, phase)
        yield Fault("SIGSTOP", CONDUCTOR, phase, says="the conductor is gone")
        yield Fault("SIGTERM", CONDUCTOR, phase, does=STOPS, says="SIGTERM", limit_s=KILLED_S)
        yield Fault("pause of 3 s", CONDUCTOR, phase, does=BORNE)
        yield Fault("pause of 3 s", "actor rank 0", phase, does=BORNE)
        for first, second in TWICE:
            says = _dead(first, phase, "SIGKILL") + ("|cut off in the middle" if second == CONDUCTOR else "")
            yield Fault("SIGKILL, one after the other", f"{first}, {second}", phase, says=says)
    for name in ("SIGSEGV", "SIGABRT"):
        for rank in RANKS:
            yield Fault(name, rank, "train", says=_dead(rank, "train", name), limit_s=KILLED_S)
    yield Fault("SIGINT", CONDUCTOR, "train", does=STOPS, says="Ctrl-C", limit_s=KILLED_S)


def killed(target: str, phase: str) -> Fault:
    """Return the SIGKILL of a rank or of the conductor."""
    says = "cut off in the middle" if target == CONDUCTOR else _dead(target, phase, "SIGKILL")
    return Fault("SIGKILL", target, phase, says=says, limit_s=KILLED_S)


def _dead(rank: str, phase: str, name: str) -> str:
    """Say how a rank is named whose process is gone; before its hello the conductor has no more than its role."""
    role, _, number = rank.partition(" rank ")
    gone = rf"role {role} died: (?:rank {number}\b.*(?:{name}|gone)|.*gone: rank {number}\b)"
    if role == "rollout":
        gone = rf"(?:{gone}|engine {number} on \S+ is lost: .*{name})"
    return rf"(?:{gone}|role {role} died)" if phase == START else gone


def _silent(rank: str, phase: str) -> str:
    role, _, number = rank.partition(" rank ")
    named = rf"(?:role {role} died: rank {number}\b|behind is {role} rank {number}\b|engine {number} on \S+ is lost)"
    if role != "rollout":
        named = rf"(?:role {role} died: rank {number}\b|behind is {role} rank {number}\b)"
    return rf"(?:{named}|role {role}\b|{role} rank {number}\b|{role}: .*{number})" if phase == START else named


def others() -> Iterator[Fault]:
    """Yield the faults that are no signals."""
    hung = "reward function"
    yield Fault("hang", "reward function", "score", says=rf"behind is the {hung}")
    yield Fault(
        "exception",
        "reward function",
        "score",
        says=r"reward\.py:\d+: reward_func raised RuntimeError",
        limit_s=KILLED_S,
    )
    yield Fault("too few rewards", "reward function", "score", says=r"reward\.py: reward_func returned 1 rewards")
    yield Fault("sys.exit", "reward function", "score", says=r"reward\.py:\d+: reward_func raised SystemExit")
    yield Fault("collective not entered", "actor rank 1", "train", says=r"behind is actor rank 1\b")
    yield Fault("interpreter's lock held", "actor rank 1", "train", says=r"behind is actor rank 1\b")
    yield Fault("exception", "actor rank 1", "train", says=r"plugin\.py:\d+", limit_s=KILLED_S)
    for jump in ("+1 h", "-1 h", "+10 years"):
        yield Fault(f"clock jump {jump}", "all of the run", ANY, does=BORNE)
    for attack in ("truncated", "replayed", "forged", "random"):
        yield Fault(f"{attack} messages", "control port", ANY, does=BORNE)
    for damage in ("truncated", "flipped bit", "without manifest", "without actor"):
        yield Fault(f"newest checkpoint {damage}", "run directory", ANY, says="is skipped")
    yield Fault("deleted", "run directory", "train", says="error: .*has vanished", apart=True)
    yield Fault("renamed", "run directory", "checkpoint", says="error: .*has vanished", apart=True)
    for phase in ("train", "checkpoint", EXPORT):
        yield Fault(
            "full disk", "run directory", phase, says="error: .*No space left on device", needs="root", apart=True
        )
    yield Fault("file size limit", "actor rank 0", "checkpoint", says="error: .*File too large")
    yield Fault("file size limit", CONDUCTOR, "checkpoint", says="error: .*File too large")


NODE: Final = r"(role \w+ died: .* on {node}\b|engine \d on {node} is lost)"
EACH: Final = (1, 3)
"""Ranks of a role on a node: where there are several, a torchrun ends the others of a rank that was killed."""


def on_cluster(each: int) -> Iterator[Fault]:
    """Yield the faults of a cluster that has `each` ranks of a role on a node: the actor on two, the others on one."""

    def fault(kind: str, target: str, phase: str, does: str = HURTS, says: str = "", limit_s: float = 60.0) -> Fault:
        return Fault(kind, target, phase, does=does, says=says, limit_s=limit_s, needs="slurm", each=each)

    last = f"actor rank {2 * each - 1}"
    for role in (*TRAINERS, REWARD):
        yield fault("SIGKILL", f"srun of {role}", "train", says=rf"role {role} died")
        for rank in dict.fromkeys((0, 2 * each - 1 if role == ACTOR else each - 1)):
            says = rf"role {role} died: rank {rank}\b.* was killed by SIGKILL"
            yield fault("SIGKILL", f"{role} rank {rank}", "train", says=says, limit_s=NAMED_S)
    for phase in ("generate", "checkpoint"):
        lost = r"(role rollout died: rank 0|engine 0 on \S+ is lost)"
        yield fault("SIGKILL", "rollout rank 0", phase, says=lost)
    yield fault("SIGKILL", "srun of rollout", "generate", says=r"(role rollout died|engine \d on \S+ is lost)")
    yield fault("SIGKILL", CONDUCTOR, "train", says="cut off")
    yield fault("SIGSTOP", last, "train", says=_silent(last, "train"))
    yield fault("crash", f"node of {last}", "train", says=NODE)
    yield fault("crash", "node of rollout rank 1", "generate", says=NODE)
    yield fault("network cut", f"node of {last}", "train", says=NODE)
    yield fault("network cut", "node of rollout rank 1", "generate", says=NODE)
    # Where no engine is on the stand-in, timeout.connect alone tells of a death before the ranks' hello.
    hello_s = 60.0 if each == 1 else 150.0
    yield fault("crash, one after the other", f"node of {last}, its stand-in", "train", says=NODE, limit_s=hello_s)
    yield fault("crash", "node of conductor", "train", says="the conductor is gone")
    yield fault("restart", "slurmctld", "train", does=BORNE)
    yield fault("SIGKILL", f"slurmd of {last}", "train", does=BORNE)
    yield fault("clock jump +1 h", f"node of {last}", ANY, does=BORNE)
    yield fault("clock jump -1 h", "node of conductor", ANY, does=BORNE)


SLURM: Final = tuple(fault for each in EACH for fault in on_cluster(each))
"""Faults of a cluster; the tests run them on a Slurm of their own."""


def all_faults() -> list[Fault]:
    """List every fault, each name once."""
    return [*signals(), *others(), *SLURM]
