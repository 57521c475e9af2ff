"""How the end of a process is told: one wording, wherever it was seen."""

from __future__ import annotations

import pytest

from slurm_rlhf.cluster.processes import exit_text, usual_cause


@pytest.mark.parametrize(
    ("code", "how", "cause"),
    [
        (0, "ended with status 0", ""),
        (2, "ended with status 2", ""),
        (128, "ended with status 128", ""),
        (143, "ended with status 143 (128 + SIGTERM)", ""),  # a conductor that was told to save and leave
        (137, "ended with status 137 (128 + SIGKILL)", ""),  # a shell, or srun, tells of its child's signal
        (255, "ended with status 255", ""),
        (-15, "was killed by SIGTERM", ""),
        (-9, "was killed by SIGKILL", " (often: the node's or the job's memory was full; lower vllm.cpu_kvcache_gib"),
        (-7, "was killed by SIGBUS", " (often: /dev/shm was full)"),
        (-35, "was killed by signal 35", ""),  # one that has no name
    ],
)
def test_the_end_of_a_process_in_words(code: int, how: str, cause: str) -> None:
    assert exit_text(code) == how
    assert usual_cause(code).startswith(cause)
    assert bool(usual_cause(code)) == bool(cause)
