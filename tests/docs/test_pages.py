"""`slurm-rlhf docs`: the list, a page as Markdown or formatted on a terminal, and a topic that is not there."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from waiting import HANG_S

from slurm_rlhf.cli import main as cli
from slurm_rlhf.docs.pages import TOPICS, page


def test_without_a_topic_the_pages_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: slurm-rlhf docs [TOPIC]"
    assert [line.split()[0] for line in lines[2:]] == list(TOPICS)


@pytest.mark.parametrize("word", ["data_and_reward", "data-and-reward", "data_and_reward.md"])
def test_a_page_into_a_pipe_is_markdown(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs", word]) == 0
    assert capsys.readouterr().out == page("data_and_reward")


def test_a_topic_that_is_not_there_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs", "algorithm"]) == 2
    error = capsys.readouterr().err
    assert "there is no page 'algorithm'; did you mean algorithms?" in error
    assert "trouble" in error
    assert cli.main(["docs", "first_run", "trouble"]) == 2


def on_a_terminal(topic: str, columns: int) -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "slurm_rlhf.cli", "docs", topic]
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    done = subprocess.Popen(command, stdin=theirs, stdout=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    assert done.wait(timeout=HANG_S) == 0
    return shown.decode()


def test_on_a_terminal_it_is_formatted() -> None:
    text = on_a_terminal("resume", 90)
    assert "\x1b[" in text
    assert "# Resume" not in text
    assert "Resume and requeue" in text


def test_on_a_terminal_no_name_in_a_table_is_cut() -> None:
    """Names longer than a column: of trackers' files, and of keys."""
    text = on_a_terminal("keys", 80)
    assert "rollout.n_samples_per_p" in text  # it goes on in the next line
    assert "…" not in text
