"""Helpers that all rooms share: long lists in messages, files that appear whole, waiting with a deadline."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from waiting import HANG_S

from slurm_rlhf.errors import printable, shortened, shortened_lines
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import write_atomically


def test_a_long_list_is_cut_and_counted() -> None:
    assert shortened(["a", "b"], 2) == "a, b"
    assert shortened(["a", "b", "c"], 2) == "a, b and 1 more"
    assert shortened((str(n) for n in range(7)), separator=" and ") == "0 and 1 and 2 and 3 and 4 and 2 more"
    assert "said:" + shortened_lines(["a", "b", "c"], 2) == "said:\n  a\n  b\n  and 1 more"
    assert shortened_lines(["a", "b"], 2) == "\n  a\n  b"


def test_a_file_is_replaced_whole_and_nothing_is_left_with_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "one")
    write_atomically(path, "two", durable=True)
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\udc80")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_has_the_rights_that_the_user_gives_or_is_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "open", "")
        write_atomically(tmp_path / "closed", "", private=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "closed").stat().st_mode) == 0o600


def test_waiting_ends_with_what_is_awaited_or_with_the_deadline() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), HANG_S, 0.001, 0.001)
    assert next(answers, None) is None
    assert not wait_until(lambda: False, 0.02)
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 / 0, HANG_S)


def test_text_of_a_log_moves_no_cursor() -> None:
    """Such text sets no title either, clears no screen, fills no clipboard and turns no direction of writing."""
    wild = "a\x1b]0;title\x07\x1b[2J\x1b]52;c;eA==\x07\x9b2J\u202eb\r\n\tc"
    assert printable(wild) == (r"a\x1b]0;title\x07\x1b[2J\x1b]52;c;eA==\x07\x9b2J\u202eb\r" + "\n\tc")
