"""GPUs granted on each node, asked of `scontrol` where the environment does not tell."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from slurm_rlhf.cluster.nodelist import expand
from slurm_rlhf.cluster.slurm_counts import parse_gpus
from slurm_rlhf.errors import PlacementError

_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_ASKED = re.compile(r"\bTresPerNode=(\S+)")
_TIMEOUT_S = 30.0


def parse_job_details(text: str) -> dict[str, int]:
    """Node -> GPUs, from the `Nodes=... GRES=...` parts of `scontrol show job --details`. Raises ValueError.

    A job that is alone on its nodes (--exclusive) has all of their GPUs, but its steps get no more on a node than
    --gres or --gpus-per-node asked for.
    """
    gpus: dict[str, int] = {}
    asked = _ASKED.search(text)
    most = parse_gpus(asked[1]) if asked else None
    for nodes, resources in _NODES.findall(text):
        gpus.update(dict.fromkeys(expand(nodes), parse_gpus(resources) if resources not in ("", "(null)") else 0))
    return {node: min(count, most) if most else count for node, count in gpus.items()}


def ask_scontrol(job_id: int, nodes: Sequence[str], command: str = "scontrol") -> tuple[int, ...]:
    """GPUs that job `job_id` has on each of `nodes`. Blocks for up to 30 s.

    Raises PlacementError where Slurm does not answer, or says nothing of one of the nodes.
    """
    try:
        answer = subprocess.run(
            [command, "show", "job", "--details", str(job_id)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        granted = parse_job_details(answer.stdout)
        return tuple(granted[node] for node in nodes)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise PlacementError(
            f"cannot tell how many GPUs job {job_id} has on each node: its environment does not say, and `{command} "
            f"show job --details {job_id}` failed ({error!r}): ask for the GPUs with --gpus-per-node"
        ) from error
