"""Kinds of sandbox: their command lines, which one a node has, and how programs in it end."""

from __future__ import annotations

import os
import sys

import pytest
from waiting import scaled

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.sandbox import box
from slurm_rlhf.sandbox.box import COMMANDS, LACKS, Limits, SandboxJob, readable, variables

JOB = SandboxJob("/opt/tool", "/tmp/job", ("/usr", "/opt/python"), Limits(5), own_user=False)


def test_bubblewrap_shares_nothing_and_writes_nowhere() -> None:
    words = " ".join(COMMANDS["bubblewrap"](JOB, ["python", "x.py"]))
    assert words.startswith("/opt/tool --die-with-parent --unshare-ipc --unshare-pid --unshare-net --unshare-uts ")
    assert "--unshare-user" in words
    assert " --ro-bind /usr /usr " in words
    assert " --bind " not in words
    assert "--size 67108864 --tmpfs /tmp --ro-bind /tmp/job /tmp/job --remount-ro /" in words
    assert words.endswith(" -- python x.py")


def test_apptainer_has_the_flags_that_shut_the_host_out() -> None:
    words = " ".join(COMMANDS["apptainer"](JOB, ["python", "x.py"]))
    assert (
        "exec --cleanenv --containall --net --network=none --no-privs --scratch=/dev/shm --no-mount=home,sys," in words
    )
    assert "--bind=/tmp/job/image/var/tmp:/var/tmp:ro --bind=/usr:/usr:ro " in words
    assert words.endswith("--no-eval --pwd /tmp /tmp/job/image python x.py")


def test_every_kind_says_what_it_cannot_do() -> None:
    assert COMMANDS.keys() == LACKS.keys()
    assert (box.described("bubblewrap"), "network" in box.described("none")) == ("bubblewrap", True)


def test_a_program_sees_this_python_and_no_variables_of_the_user() -> None:
    paths = readable({"LD_LIBRARY_PATH": "/nowhere:/etc"}, "/usr/share")
    assert "/etc" in paths
    assert "/nowhere" not in paths
    assert "/usr/share" not in paths  # in /usr
    assert any(sys.prefix.startswith(path) for path in paths)
    assert os.path.expanduser("~") not in paths
    assert "SECRET" not in variables({"SECRET": "x"}, "/tmp")


def test_a_kind_that_the_node_lacks_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    box.chosen.cache_clear()
    box.problem.cache_clear()
    with pytest.raises(ConfigError, match=r"reward.sandbox = 'apptainer': .*no command apptainer .*'none'"):
        box.chosen("apptainer")


def test_threads_of_the_user_count_where_the_kernel_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getuid()
    monkeypatch.setattr(box, "_processes", lambda: [(mine, 1, 3, 0), (mine + 1, 2, 5, 0), (mine, 2, 4, 0)])
    assert [box._counted_too("landlock", own_user) for own_user in (False, True)] == [7, 0]


@pytest.mark.parametrize(
    ("output", "said"), [(b"42\n", ""), (b"bwrap\nno namespaces\n\n", "no namespaces"), (b"", "ended with 1 (exit)")]
)
def test_the_reason_is_the_last_line_of_what_a_kind_says(
    monkeypatch: pytest.MonkeyPatch, output: bytes, said: str
) -> None:
    monkeypatch.setattr(box, "execute", lambda *given: box.ProgramEnd("exit", 1, output))
    box.problem.cache_clear()
    assert box.problem("bubblewrap") == said
    box.problem.cache_clear()


@pytest.mark.slow
def test_auto_takes_the_best_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    works = {"bubblewrap": "no user namespaces", "apptainer": "none", "landlock": ""}
    monkeypatch.setattr(box, "problem", works.__getitem__)
    box.chosen.cache_clear()
    assert box.chosen("auto") == "landlock"
    works["landlock"] = "old kernel"
    box.chosen.cache_clear()
    with pytest.raises(ConfigError, match="no user namespaces; apptainer: none; landlock: old kernel"):
        box.chosen("auto")
    box.chosen.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind == "apptainer")) for kind in COMMANDS]
)
def test_a_program_gets_its_input_and_files_and_its_end_is_reported(kind: str) -> None:
    code = "import sys; print(sys.stdin.read() + open(sys.argv[1]).read()); open('new', 'w').write('x'); sys.exit(3)"
    program = [sys.executable, "-IS", "-c", code, "{work}/name"]
    ended = box.execute(kind, program, {"name": "text"}, b"given ", Limits(scaled(60)))
    assert (ended.how, ended.code, ended.output) == ("exit", 3, b"given text\n")
    ended = box.execute(kind, [sys.executable, "-IS", "-c", "import os; os.abort()"], {}, b"", Limits(scaled(60)))
    assert ended.code in (128 + 6, 128 + 11)  # by a signal
