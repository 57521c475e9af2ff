"""The port where the torchruns of a role meet: from the job, below the ports that the kernel hands out."""

from __future__ import annotations

from pathlib import Path

ATTEMPTS = 5
"""Ports tried before a role is given up."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL = 32768
_SPAN = 8192
_LOWEST = 2048
_ROLES = 8
_RESTARTS = 4
_STRIDE = 997  # coprime to the span, and away from the ports of neighbouring jobs


def ephemeral_start(table: Path = _EPHEMERAL) -> int:
    """The first port that the kernel hands out to whoever asks for none; on some machines as low as 9000."""
    try:
        return int(table.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL


def meeting_port(job: int, restart: int, role: int, attempt: int, ephemeral: int) -> int:
    """A port below `ephemeral` for role number `role` of a job's `restart`-th restart.

    The roles of a job never share one, nor do jobs whose numbers are near each other. Another attempt is another port.
    """
    top = min(max(ephemeral, _LOWEST + _SPAN // 4), _USUAL_EPHEMERAL)
    bottom = max(_LOWEST, top - _SPAN)
    number = (job * _RESTARTS + restart % _RESTARTS) * _ROLES + role % _ROLES
    return bottom + (number + attempt * _STRIDE) % (top - bottom)
