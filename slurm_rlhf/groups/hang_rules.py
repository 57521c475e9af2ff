"""Names the ranks that hold up a run when nothing moves: pure functions of the stacks and the calls in flight."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import slurm_rlhf
from slurm_rlhf.errors import shortened
from slurm_rlhf.observe.stacks import Frame, ThreadStack
from slurm_rlhf.workers.pool import WORKER

StackSource = Literal["itself", "lock", ""]
"""Source of a stack: the rank; its log, while something held the interpreter's lock; none."""

Kind = Literal["collective", "device", "sync", "idle", "follows", "busy", "locked", "unknown"]

_USERS_CODE = ("reward", WORKER)
"""Names of the stacks that have the user's code: in threads of `rewards.scored.Scoring`, and in workers."""

_WAITS: tuple[tuple[str, Kind], ...] = (
    ("/slurm_rlhf/wire/client.py", "idle"),
    ("/slurm_rlhf/ranks/follower_links.py", "follows"),
    ("/slurm_rlhf/ranks/engine_follower.py", "follows"),
    ("/slurm_rlhf/weights/", "sync"),
    ("/torch/distributed/", "collective"),
    ("/vllm/distributed/", "collective"),
    ("/deepspeed/comm/", "collective"),
)
"""Part of a file's path -> what a thread waits for if its innermost call is in that file."""
_WORK_LINES = (".wait(",)
_DEVICE_LINES = ("synchronize(", ".item()", ".cpu()", ".tolist()")
"""Parts of lines in which a thread waits for its device: with NCCL it waits for collectives there."""
_WAITERS = ("/torch/", "/deepspeed/", "/vllm/", "/slurm_rlhf/trainer/")
_WAITING = ("collective", "device", "sync", "follows")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD = ("/lib/python3", "<frozen", "<string>")
_OWN = f"{Path(slurm_rlhf.__file__).parent}/"
_ENVIRONMENTS = f"{_OWN}environments/"


@dataclass(frozen=True, slots=True)
class Sighting:
    """Holds what is known of one rank."""

    role: str
    rank: int
    node: str
    pid: int
    call: str = ""  # call in flight; empty: none
    call_s: float = 0.0  # seconds since the call began
    silent_s: float = 0.0
    threads: tuple[ThreadStack, ...] = ()  # the main thread first; empty: unknown
    source: StackSource = ""
    process: str = ""  # state of the process by its node: "T (stopped)"

    @property
    def name(self) -> str:
        return f"{self.role} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class RankState:
    """Says what a rank does."""

    kind: Kind
    at: Frame | None = None  # innermost call; unless it is busy, outside of the standard library
    by: Frame | None = None  # innermost call outside of libraries


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Names the ranks that hold up the run (none: the conductor does), and says what the others wait for."""

    behind: tuple[Sighting, ...]
    words: str

    @property
    def alive(self) -> bool:
        """Tell whether one of their processes was seen."""
        return not self.behind or any(each.threads or each.process for each in self.behind)


def rank_state(seen: Sighting, line_of: Callable[[str, int], str] = linecache.getline) -> RankState:
    """Classify a rank by its main thread; `line_of`: the text of a line of a file."""
    frames = seen.threads[0].frames if seen.threads else ()
    if not frames:
        return RankState("unknown")
    by = next((frame for frame in frames if not _library(frame)), None)
    if seen.source == "lock":
        return RankState("locked", frames[0], by)
    inner = next((frame for frame in frames if not _standard(frame)), frames[0])
    kind = _kind(inner, line_of)
    return RankState(kind, frames[0] if kind == "busy" else inner, by)


def _kind(inner: Frame, line_of: Callable[[str, int], str]) -> Kind:
    for part, kind in _WAITS:
        if part in inner.file:
            return kind
    line = line_of(inner.file, inner.line) if any(part in inner.file for part in _WAITERS) else ""
    if any(text in line for text in _WORK_LINES):
        return "collective"
    return "device" if any(text in line for text in _DEVICE_LINES) else "busy"


def _standard(frame: Frame) -> bool:
    return any(part in frame.file for part in _STANDARD) and not any(part in frame.file for part in _INSTALLED)


def _library(frame: Frame) -> bool:
    return _standard(frame) or any(part in frame.file for part in _INSTALLED)


def judge(ranks: Sequence[Sighting], conductor: Sequence[ThreadStack], width: int = 1) -> HangVerdict:
    """Name the ranks that hold up the run.

    `ranks`: all ranks of the run; `conductor`: its threads, the main thread first; `width`: ranks of an engine. In this
    order: ranks that hold their interpreter's lock; ranks that compute while others of their role wait in a
    collective; ranks in another collective than most; ranks that are silent; ranks that compute; and if no call is in
    flight, the conductor, with the user's reward function.
    """
    places = {seen.name: rank_state(seen) for seen in ranks}
    called = [seen for seen in ranks if seen.call or _engine_called(seen, ranks, width)]
    if behind := next((found for found in _candidates(ranks, called, places) if found), None):
        return _verdict(behind, places, called)
    if not called:
        return HangVerdict((), _of_conductor(conductor))
    if stuck := _those(called, places, "collective", "device", "sync"):
        where = shortened(sorted({seen.node for seen in stuck}), 8)
        waits = _waiting(stuck, places)
        return HangVerdict(tuple(stuck), f"no rank is behind: {waits}. Look at the network between its nodes ({where})")
    return HangVerdict(
        tuple(called), f"{_names(called)} did not answer, and nobody computes: the call or its answer is lost"
    )


def _candidates(
    ranks: Sequence[Sighting], called: Sequence[Sighting], places: Mapping[str, RankState]
) -> Iterator[list[Sighting]]:
    """Yield groups of ranks that may hold up the run, beginning with the strongest evidence."""
    yield _those(ranks, places, "locked")
    for role in dict.fromkeys(seen.role for seen in called):
        own = [seen for seen in called if seen.role == role]
        if _those(own, places, "collective", "device"):
            yield _those(own, places, "busy", "unknown", "idle")
    if _those(called, places, "sync"):
        yield _those(called, places, "busy", "unknown", "idle", "collective")
    stuck = _those(called, places, "collective")
    for role in dict.fromkeys(seen.role for seen in stuck):
        yield _minority([seen for seen in stuck if seen.role == role], places)
    if _those(called, places, "unknown") or not called:
        yield _those(ranks, places, "unknown")
    yield _those(called, places, "busy")


def _those(among: Sequence[Sighting], places: Mapping[str, RankState], *kinds: Kind) -> list[Sighting]:
    return [seen for seen in among if places[seen.name].kind in kinds]


def _engine_called(seen: Sighting, ranks: Sequence[Sighting], width: int) -> bool:
    """Tell whether a call is in flight to the engine of a rank; the leader of an engine takes all calls."""
    leader = seen.rank - seen.rank % width
    return width > 1 and any(other.rank == leader and other.role == seen.role and other.call for other in ranks)


def _minority(stuck: Sequence[Sighting], places: Mapping[str, RankState]) -> list[Sighting]:
    """Return the ranks that wait in another collective than most of the role, or at another line of the program."""
    kinds = [(_function(places[seen.name].at), str(places[seen.name].by)) for seen in stuck]
    ((most, count), *others) = Counter(kinds).most_common()
    if not others or others[0][1] == count:
        return []
    return [seen for seen, kind in zip(stuck, kinds, strict=True) if kind != most]


def _verdict(behind: list[Sighting], places: Mapping[str, RankState], called: Sequence[Sighting]) -> HangVerdict:
    words = "; ".join(_behind(seen, places[seen.name]) for seen in behind[:3])
    if len(behind) > 3:
        words += f"; and {len(behind) - 3} more"
    others = [seen for seen in called if seen not in behind]
    waiting = _waiting([s for s in others if places[s.name].kind in _WAITING], places)
    return HangVerdict(
        tuple(behind), f"behind {'is' if len(behind) == 1 else 'are'} {words}{f'. {waiting}' * bool(waiting)}"
    )


def _behind(seen: Sighting, place: RankState) -> str:
    call = f", in {seen.call} for {seen.call_s:.0f} s" if seen.call else ""
    who = f"{seen.name} on {seen.node} (pid {seen.pid}{call})"
    state = f"; its process is {seen.process}" if seen.process and not seen.process.startswith(("S", "R")) else ""
    match place.kind:
        case "unknown":
            return f"{who}: not heard from for {seen.silent_s:.0f} s, and no stack of it could be taken{state}"
        case "idle":
            return f"{who}: it waits for its next call, so this one has not reached it"
        case "locked":
            return f"{who}: a call into C that holds the interpreter's lock, in {_at(place)}{state}"
    return f"{who}: it is in {_at(place)}{state}"


def _waiting(ranks: Sequence[Sighting], places: Mapping[str, RankState]) -> str:
    """Say which ranks wait, and in which call, by role."""
    groups: dict[tuple[str, str], list[Sighting]] = {}
    for seen in ranks:
        groups.setdefault((seen.role, _wait_words(places[seen.name])), []).append(seen)
    return "; ".join(f"{_names(group)} wait{'s' * (len(group) == 1)} {words}" for (_, words), group in groups.items())


def _wait_words(place: RankState) -> str:
    if place.kind == "follows":
        return "for the other ranks of its engine"
    for_device = "for its device in " if place.kind == "device" else "in "
    where = f", called from {_where(place.by)}" if place.by is not None and place.by != place.at else ""
    return f"{for_device}{'weight sync, ' if place.kind == 'sync' else ''}{_function(place.at)}{where}"


def _names(ranks: Sequence[Sighting]) -> str:
    roles: dict[str, list[int]] = {}
    for seen in ranks:
        roles.setdefault(seen.role, []).append(seen.rank)
    return " and ".join(
        f"{role} rank{'s' * (len(numbers) > 1)} {shortened(map(str, numbers), 8)}" for role, numbers in roles.items()
    )


def _at(place: RankState) -> str:
    at, by = place.at, place.by
    called = f", called from {_where(by)}" if by is not None and by != at else ""
    return f"{_where(at)}{called}"


def _where(frame: Frame | None) -> str:
    return "nowhere" if frame is None else f"{frame.function} ({'/'.join(frame.file.split('/')[-2:])}:{frame.line})"


def _function(frame: Frame | None) -> str:
    return "nowhere" if frame is None else frame.function


def _of_conductor(threads: Sequence[ThreadStack]) -> str:
    """Say where the conductor is, if it waits for no rank."""
    for thread in threads:
        frames = [frame for frame in thread.frames if not _library(frame) and not frame.file.startswith(_OWN)]
        if thread.name in _USERS_CODE and frames:
            inner = f", in {_where(thread.frames[0])}" if thread.frames[0] != frames[0] else ""
            what = "environment" if any(_ENVIRONMENTS in frame.file for frame in thread.frames) else "reward function"
            return (
                f"behind is the {what}, at {frames[0].function} ({frames[0].file}:{frames[0].line}){inner}; "
                "no call to a rank is in flight"
            )
    main = threads[0].frames if threads else ()
    own = next((frame for frame in main if not _library(frame)), None)
    place = RankState("busy", main[0] if main else None, own)
    return f"behind is the conductor, in {_at(place)}; no call to a rank is in flight"
