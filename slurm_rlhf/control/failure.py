"""An exception on its way from a rank to the conductor."""

from __future__ import annotations

import traceback
from typing import Any

from slurm_rlhf.control.roster import Peer
from slurm_rlhf.errors import RemoteError, UserError, WireError

_MAX_CHARACTERS = 100_000


def to_wire(error: BaseException) -> dict[str, Any]:
    """What the conductor learns of `error`; of an endless traceback the end, where it was raised."""
    return {
        "type": type(error).__name__,
        "message": str(error)[:_MAX_CHARACTERS],
        "traceback": "".join(traceback.format_exception(error))[-_MAX_CHARACTERS:],
        "user_error": isinstance(error, UserError) or (isinstance(error, RemoteError) and error.user_error),
    }


def from_wire(wire: dict[str, Any], peer: Peer, method: str) -> RemoteError:
    """The RemoteError a call's Future raises. A user's error keeps its own words. Raises WireError."""
    values = [wire.get(key) for key in ("type", "message", "traceback", "user_error")]
    match values:
        case [str(name), str(message), str(remote_traceback), bool(user_error)]:
            text = message if user_error else f"{method} failed on {peer}: {name}: {message}"
            return RemoteError(text, remote_traceback=remote_traceback, user_error=user_error)
    raise WireError(f"{peer} failed in {method}, and its error message does not decode")
