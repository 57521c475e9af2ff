"""The glossary of metrics, docs/metrics.md, as names: capitals in one stand for what a run puts there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from slurm_rlhf.docs.pages import page


@cache
def explained() -> list[str]:
    """All names, in their order."""
    rows = re.findall(r"^\| (`.*?) \| ", page("metrics"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def unexplained(names: Iterable[str]) -> list[str]:
    """Those that the glossary lacks."""
    known = re.compile("|".join(re.sub(r"[A-Z]+", ".+", re.escape(name)) for name in explained()))
    return sorted(name for name in names if not known.fullmatch(name))
