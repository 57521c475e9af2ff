"""What a rank says without being asked, beside its heartbeats."""

from __future__ import annotations

TERMINATION = "termination"
"""It got SIGTERM."""

FAILURE = "failure"
"""It cannot go on; with the field `reason`."""
