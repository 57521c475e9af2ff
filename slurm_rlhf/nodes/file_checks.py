"""Judge what the nodes see of the run directory, models and data, and the space for checkpoints: pure."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_rlhf.errors import shortened
from slurm_rlhf.nodes.facts import NodeFacts
from slurm_rlhf.nodes.needs import Needs, Space
from slurm_rlhf.nodes.network_checks import exclude
from slurm_rlhf.nodes.report import FAILED, WARNING, Check, Finding

Facts = Mapping[str, NodeFacts]
_GB = 1e9
_MAKE_ROOM = "Free space, keep fewer (ckpt.max_num), or take another disk (run_dir)"


def run_directory(facts: Facts, needs: Needs, token: str) -> Check:
    """Name nodes that do not see the canary, which holds `token`, or cannot write beside it."""
    found: list[Finding] = []
    blind = tuple(node for node, each in facts.items() if each.canary != token)
    if blind:
        seen = shortened([node for node in facts if node not in blind] or ["the node that runs the conductor"], 4)
        said = f"run_dir {needs.run_dir} is not shared by all nodes: {shortened(blind, 4)} cannot see what {seen} wrote"
        said += " there"
        remedy = (
            "Put it on a file system that every node mounts (often /scratch or your home; not /tmp): "
            f"--run_dir=/SHARED/DIRECTORY, or leave nodes without the mount out: {exclude(*blind)}"
        )
        found.append(Finding(FAILED, blind, said, remedy))
    locked = {node: each.run_dir for node, each in facts.items() if each.run_dir and node not in blind}
    if locked:
        said = f"run_dir {needs.run_dir} cannot be written on {shortened(locked, 4)}: {next(iter(locked.values()))}"
        found.append(Finding(FAILED, tuple(locked), said, f"Mount it there for writing, or {exclude(*locked)}"))
    return Check("run directory", f"{needs.run_dir}: every node sees the canary and can write", tuple(found))


def places(facts: Facts) -> Check:
    """Name nodes that cannot read a model, the data, or a file of the user."""
    lacking: dict[tuple[str, str, str], list[str]] = {}
    for node, each in facts.items():
        for place in each.places:
            if place.problem:
                lacking.setdefault((place.key, place.path, place.problem), []).append(node)
    found = tuple(
        Finding(
            FAILED,
            tuple(nodes),
            f"{key} = {path} cannot be read on {shortened(nodes, 4)}: {problem}",
            f"Put it on a file system that every node mounts, mend its permissions, or {exclude(*nodes)}",
        )
        for (key, path, problem), nodes in lacking.items()
    )
    seen = dict.fromkeys(place.key for each in facts.values() for place in each.places)
    return Check("models and data", f"every node reads {', '.join(seen) or 'nothing'}", found)


def space(facts: Facts, needs: Needs) -> Check:
    """Compare the free bytes and files of the run directory with the checkpoints that the run keeps.

    What the user's quota leaves counts, where it is less than what the file system has.
    """
    want, quota = needs.space, needs.quota
    known = [each for each in facts.values() if each.free_bytes >= 0]
    if want is None or not known:
        return Check("disk space", "not known: the sizes of the models cannot be read")
    free = min(each.free_bytes for each in known)
    files = min((each.free_files for each in known if each.free_files >= 0), default=-1)
    place = of_bytes = of_files = f"run_dir {needs.run_dir}"
    if quota is not None and quota.free_bytes is not None and quota.free_bytes < free:
        free, of_bytes = quota.free_bytes, f"your quota on {place} (by `{quota.by}`)"
    if quota is not None and quota.free_files is not None and (files < 0 or quota.free_files < files):
        files, of_files = quota.free_files, f"your quota on {place} (by `{quota.by}`)"
    found = _lacking_bytes(of_bytes, want, free + want.there) or _lacking_files(of_files, want, files)
    told = f"{want.kept} checkpoints of {_size(want.one)} each, {_size(free)} free"
    return Check("disk space", told, tuple(found))


def _lacking_bytes(place: str, want: Space, room: int) -> list[Finding]:
    if room < want.one:
        said = f"{place} has room for {_size(room)}, and one checkpoint takes about {_size(want.one)}"
        return [Finding(FAILED, (), said, _MAKE_ROOM)]
    total = want.kept * want.one
    if room < total:
        fit = room // max(want.one, 1)
        said = f"{place} has room for {fit} checkpoints, and ckpt.max_num = {want.kept} take {_size(total)}"
        return [Finding(WARNING, (), said, _MAKE_ROOM)]
    return []


def _lacking_files(place: str, want: Space, files: int) -> list[Finding]:
    if not 0 <= files < want.files * want.kept:
        return []
    said = f"{place} has {files} inodes left, and the checkpoints take about {want.files * want.kept}"
    return [Finding(FAILED if files < want.files else WARNING, (), said, _MAKE_ROOM)]


def locks(needs: Needs) -> Check:
    """Warn where the run directory is on a file system that cannot lock files."""
    if not needs.lock:
        return Check("locks", "files in run_dir can be locked")
    said = f"files in run_dir {needs.run_dir} cannot be locked: {needs.lock}"
    remedy = (
        "The run works, but does not notice a second one in the same directory: never start two there, or take a file "
        "system with locks (Lustre: mounted with -o flock)"
    )
    return Check("locks", "", (Finding(WARNING, (), said, remedy),))


def _size(count: int) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB / 10 else f"{count / 1e6:.1f} MB"
