"""List the exceptions of the package, and write the lists, long texts and nearest names in their messages.

Every message says what happened, where, why, and how to fix it.

SlurmRlhfError                  anything this package raises on purpose
├── UserError                   the user can fix it: printed without a traceback, exit code 2
│   ├── ConfigError             unknown key, wrong type, sizes that do not divide
│   ├── DataError               a data file, with its name and line
│   ├── ModelError              a model directory that cannot be used
│   ├── RewardError             the user's reward function
│   ├── WorkerError             code of the user's that failed in a process of its own
│   ├── SelfCheckError          the run would train something else than it was asked to
│   ├── PlacementError          roles that do not fit the nodes, an allocation that is too small
│   ├── DiskError               a disk that is full, a run directory that has vanished
│   └── CheckpointError         a checkpoint that is missing, partial or of another run
└── RunError                    the run broke: printed with the role that broke it, exit code 1
    ├── RoleDied                a role's process ended or fell silent
    ├── CallTimeout             a call passed its deadline
    ├── RemoteError             a role's handler raised; carries the remote traceback for the log
    ├── EngineBroken            an engine that cannot go on and has to be started again
    ├── RunHung                 nothing moved for longer than the watchdog allows
    ├── FilteredAway            dynamic sampling dropped nearly every group
    ├── WireError               a frame that does not decode, a peer that is not ours
    ├── StrangerError           a store, a rank or a pickle of somebody who does not belong to the run
    └── SyncError               weights that did not arrive, or arrived different
        └── SyncBroken          connections of a transfer that broke or fell silent: a new group may help
"""

from __future__ import annotations

import difflib
import os
import re
import resource
from collections.abc import Iterable, Sequence


class SlurmRlhfError(Exception):
    """Stand at the root of the tree."""

    exit_code = 1
    hang = False
    """True: somebody was silent for too long; False: something ended, failed or was refused."""


class UserError(SlurmRlhfError):
    """Report what the user can fix; the message alone must be enough to do so."""

    exit_code = 2


class ConfigError(UserError):
    """Report a configuration that cannot be run."""


class DataError(UserError):
    """Report a data file that cannot be read; names the file and the line."""


class ModelError(UserError):
    """Report a model directory that cannot be used; names what is missing in it."""


class RewardError(UserError):
    """Report that the user's reward function failed or returned something that is not a reward."""


class EpisodeError(RewardError):
    """Report that the user's environment failed or returned something with which no episode can go on."""


class WorkerError(UserError):
    """Report a call of the user's code, in a process of its own, that failed.

    `kind`: late (past its deadline), ended (a signal, an exit), memory (past its limit), raised (an exception), gone
    (another call has ended the process that it was meant for), unanswered (no server takes the request).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SelfCheckError(UserError):
    """Report that the run would train something else than it was asked to."""


class PlacementError(UserError):
    """Report roles that do not fit the nodes; says what would fit."""


class DiskError(UserError):
    """Report a disk that refuses to be written; says what is free on it."""


class CheckpointError(UserError):
    """Report a checkpoint that cannot be used; names the one that can, if there is one."""


class RunError(SlurmRlhfError):
    """Report that the run broke while it was running."""

    def __init__(self, message: str = "", *, hang: bool = False) -> None:
        super().__init__(message)
        self.hang = self.hang or hang


class RoleDied(RunError):
    """Report that a process of a role ended, or (`hang`) was not heard from within its deadline."""


class CallTimeout(RunError):
    """Report that a call to a role did not return within the deadline of the table."""

    hang = True


class RemoteError(RunError):
    """Report that the handler of a role raised.

    `user_error` is True when the remote exception was a `UserError`, so that the conductor reports it as one.
    `remote_traceback` belongs into the log, never on the user's terminal. `role` is the role whose rank raised; empty:
    unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        remote_traceback: str = "",
        user_error: bool = False,
        hang: bool = False,
        role: str = "",
        node: str = "",
    ) -> None:
        super().__init__(message, hang=hang)
        self.remote_traceback = remote_traceback
        self.role = role
        self.node = node
        self.user_error = user_error
        if user_error:
            self.exit_code = UserError.exit_code


class EngineBroken(RunError):
    """Report that an engine cannot go on, because one of its ranks is gone or out of step with the others."""


class RunHung(RunError):
    """Report that nothing moved for too long; names the ranks that are behind."""

    hang = True


class FilteredAway(RunError):
    """Report that dynamic sampling did not fill a batch; says what share of the groups passed."""


class WireError(RunError):
    """Report a message that does not decode, or whose sender is unknown."""


class StrangerError(RunError, RuntimeError):
    """Report data that no process of this run sent; a RuntimeError, like all errors of torch's process groups."""


class SyncError(RunError):
    """Report weights that did not arrive, or arrived different from what was sent; `hang`: a member was silent."""


class SyncBroken(SyncError):
    """Report a transfer that a connection or a member cut off; its data was not at fault, a new group may succeed."""


def of_hang(hang: bool) -> dict[str, bool]:
    """Return the `extra` of a logged warning that says whether it is about a hang; see `observe.run_log`."""
    return {"hang": hang}


def shortened(items: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """Join the first `most` items and count the others: "a, b and 5 more"."""
    listed = list(items)
    rest = len(listed) - most
    return separator.join(listed[:most]) + (f" and {rest} more" if rest > 0 else "")


def shortened_lines(lines: Sequence[str], most: int) -> str:
    """Put the first `most` items and the count of the others on indented lines of their own, below a message."""
    rest = len(lines) - most
    return "".join(f"\n  {line}" for line in [*lines[:most], *([f"and {rest} more"] if rest > 0 else [])])


def meant(name: str, valid: Iterable[str]) -> str:
    """Return "; did you mean X?" with the one of `valid` that is nearest to `name`; empty if none is near."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f"; did you mean {near[0]}?" if near else ""


_MEMORY = re.compile(
    r"\bMemoryError\b|\bstd::bad_alloc\b|[Cc]annot allocate memory|can't allocate memory|can't start new thread"
    r"|failed to map segment|Resource temporarily unavailable"
)
"""Error texts of Python, C libraries and the dynamic loader when the system refuses memory or a thread."""


def system_cause(text: str) -> str:
    """Say which limit, variable or mode of a GPU caused the error in `text`, and what to do; empty if none did.

    `text` may come from another process of the run, which has inherited the limits and variables.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and _MEMORY.search(text):
        return (
            f"a process may have {limit / 2**30:.1f} GiB of address space here (`ulimit -v`, RLIMIT_AS), and that is "
            "used up: start with `ulimit -v unlimited`"
        )
    if "busy or unavailable" in text:  # CUDA says so
        return "another process has the GPU to itself: ask for compute mode Default, or leave train.colocate_... out"
    preloaded = os.environ.get("LD_PRELOAD", "")
    if preloaded and "[Errno 22]" in text:
        return f"LD_PRELOAD = {preloaded} replaces calls of the system: start without it"
    return ""


def printable(text: str) -> str:
    """Escape control characters, except line ends and tabs, so that text of models, data or logs moves no cursor."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def cut(text: str, most: int) -> str:
    """Show the first `most` characters of a longer text, and say how long it is."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"
