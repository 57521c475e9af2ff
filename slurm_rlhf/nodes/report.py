"""The report of a preflight: checks with their findings, as a table, as JSON, as an error."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurm_rlhf.errors import PlacementError, shortened

OK, WARNING, FAILED = "ok", "warning", "failed"
_ORDER = (OK, WARNING, FAILED)
_WIDTH = 118
_SHOWN = 8  # findings of a check in the table and in an error


@dataclass(frozen=True, slots=True)
class Finding:
    """Say what is wrong, on which nodes, and what to do about it."""

    verdict: str  # OK: something to know
    nodes: tuple[str, ...]  # culprits; empty: the finding is of no node
    said: str
    remedy: str
    avoid: bool = False  # a warning for which a run with a spare node leaves these out


@dataclass(frozen=True, slots=True)
class Check:
    """Hold one row of the table; `said` is what was seen where all is well."""

    name: str
    said: str
    findings: Sequence[Finding] = ()

    @property
    def verdict(self) -> str:
        return max((finding.verdict for finding in self.findings), key=_ORDER.index, default=OK)


def failed(said: str, remedy: str, *nodes: str) -> Finding:
    """Make a finding with which a run cannot start."""
    return Finding(FAILED, nodes, said, remedy)


def warned(said: str, remedy: str, *nodes: str, avoid: bool = False) -> Finding:
    """Make a finding with which a run can start."""
    return Finding(WARNING, nodes, said, remedy, avoid)


def exclude(*nodes: str) -> str:
    """Return the option that leaves nodes out of the next allocation."""
    return f"--exclude={','.join(nodes)}"


@dataclass(frozen=True, slots=True)
class Report:
    """Hold all checks of some nodes."""

    nodes: tuple[str, ...]
    checks: tuple[Check, ...]
    seconds: float
    left_out: tuple[str, ...] = ()  # bad nodes that spares stand in for

    @property
    def findings(self) -> list[Finding]:
        """Return what is wrong apart from the nodes that are left out."""
        gone = set(self.left_out)
        found = [finding for check in self.checks for finding in check.findings]
        return [each for each in found if not (each.nodes and set(each.nodes) <= gone)]

    @property
    def verdict(self) -> str:
        return max((finding.verdict for finding in self.findings), key=_ORDER.index, default=OK)

    def bad_nodes(self, avoided: bool = True) -> tuple[str, ...]:
        """Return the nodes on which a run cannot start; `avoided`: also those to leave out while there are others."""
        findings = [each for check in self.checks for each in check.findings]
        bad = {node for each in findings if each.verdict == FAILED or (avoided and each.avoid) for node in each.nodes}
        return tuple(node for node in self.nodes if node in bad)

    def to_json(self) -> dict[str, Any]:
        checks = [
            {**asdict(check), "verdict": check.verdict, "findings": list(map(asdict, check.findings))}
            for check in self.checks
        ]
        return {
            "verdict": self.verdict,
            "seconds": round(self.seconds, 1),
            "nodes": list(self.nodes),
            "left_out": list(self.left_out),
            "checks": checks,
        }

    def require(self) -> None:
        """Raise PlacementError if a run cannot start; it names the culprits and the remedies."""
        failed = [finding for finding in self.findings if finding.verdict == FAILED]
        if failed:
            lines = [_with_remedy(finding) for finding in failed[:_SHOWN]]
            rest = [f"and {len(failed) - _SHOWN} more: slurm-rlhf preflight shows all"] if failed[_SHOWN:] else []
            raise PlacementError("\n  ".join(["preflight failed:", *lines, *rest]))

    def notes(self) -> list[str]:
        """Return what a run that starts tells its user: warnings, and the nodes left out."""
        named = {WARNING: "warning: preflight", OK: "preflight"}
        found = [f"{named[each.verdict]}: {_with_remedy(each)}" for each in self.findings if each.verdict in named]
        if self.left_out:
            why = shortened(self._said_of(set(self.left_out)), 3, "; ")
            found.append(f"preflight: left out {', '.join(self.left_out)}, a spare takes over: {why}")
        return found

    def unfit(self) -> dict[str, str]:
        """Return the nodes that are left out, and why: during the run, too, no rank is to be put there."""
        return {node: shortened(self._said_of({node}), 3, "; ") for node in self.left_out}

    def _said_of(self, nodes: Collection[str]) -> list[str]:
        """List what makes any of `nodes` bad."""
        found = [each for check in self.checks for each in check.findings]
        return [each.said for each in found if {*each.nodes} & {*nodes} and (each.verdict == FAILED or each.avoid)]


def draw(report: Report) -> str:
    """Draw a row per check, and below it each finding with its remedy."""
    width = max(len(check.name) for check in report.checks)
    names, count = shortened(report.nodes, 4), len(report.nodes)
    nodes = f"{count} nodes ({names})" if count > 1 else names
    lines = [f"preflight of {nodes} in {report.seconds:.1f} s: {report.verdict}"]
    for check in report.checks:
        head = f"{check.name:{width}}  {check.verdict:7}  "
        lines += _wrapped(head, check.said if not check.findings else _with_remedy(check.findings[0]))
        for finding in check.findings[1:_SHOWN]:
            lines += _wrapped(" " * len(head), _with_remedy(finding))
        if check.findings[_SHOWN:]:
            lines.append(f"{' ' * len(head)}and {len(check.findings) - _SHOWN} more")
    if report.left_out:
        lines.append(f"left out: {', '.join(report.left_out)}")
    return "\n".join(lines)


def _with_remedy(finding: Finding) -> str:
    end = "\n" if "\n" in finding.said else ". "
    return f"{finding.said}{end}{finding.remedy}" if finding.remedy else finding.said


def _wrapped(head: str, text: str) -> list[str]:
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, _WIDTH - len(head)) or [""]]
    return [f"{head if not number else ' ' * len(head)}{line}" for number, line in enumerate(lines)]
