"""How the end of a process is told: one wording, wherever it was seen."""

from __future__ import annotations

import resource

import pytest

from slurm_rlhf.cluster.processes import exit_text, raise_descriptors, usual_cause
from slurm_rlhf.errors import ConfigError


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


def test_a_process_may_open_as_many_files_as_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank costs the conductor two; a limit without end is one that some programs count up to."""
    for before, after in (
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((1024, 1 << 30), (65536, 1 << 30)),
        ((100_000, 1 << 30), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ):
        made: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda which, before=before: before)
        monkeypatch.setattr(resource, "setrlimit", lambda which, limits, made=made: made.append(limits))
        raise_descriptors()
        assert made == ([after] if after else [])


def test_ranks_that_no_limit_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    raise_descriptors(448)
    with pytest.raises(ConfigError, match=r"449 ranks take 1026 .*may have 1024 open, .*`ulimit -n`"):
        raise_descriptors(449)
