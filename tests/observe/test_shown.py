"""Output that a user sees: progress on a terminal and in a log file, the tails of logs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from programs import on_terminal

from slurm_rlhf.config.schema import Logger
from slurm_rlhf.observe.live import make_progress
from slurm_rlhf.observe.log_tail import tail
from slurm_rlhf.observe.progress import Clock, PlainProgress, duration, header, line, row

ROOT = Path(__file__).parents[2]
METRICS = {
    "reward": 0.51234,
    "kl": 0.01234,
    "accuracy": 0.75,
    "perf/tokens_per_s": 2210.4,
    "time/step": 3.0,
    "time/rollout": 1.2,
    "time/update": 1.5,
    "time/advantages": 0.1,
}


def test_a_row_holds_the_numbers_under_their_names():
    shown = line(row(12, 120, METRICS, "3:20"))
    names = header(row(1, 9, METRICS, ""))
    assert len(names) == len(shown) <= 100
    under = {name: shown[: names.index(f" {name}") + len(name) + 1].split()[-1] for name in names.split()}
    assert under == {
        "step": "12/120",
        "reward": "0.512",
        "kl": "0.0123",
        "acc": "0.750",
        "tok/s": "2210",
        "sec": "3.00",
        "rollout": "1.20",
        "forward": "-",
        "update": "1.50",
        "sync": "-",
        "other": "0.30",
        "eta": "3:20",
    }


def test_a_row_fits_into_80_columns_of_a_terminal() -> None:
    shown = line(row(99999, 100000, METRICS | {"reward": -1e9, "time/rollout": 12345.678}, "99:59:59", 80))
    assert len(shown) <= 80
    assert header(row(1, 9, METRICS, "", 80)).split()[4:] == ["tok/s", "sec", "rollout", "update", "other", "eta"]
    assert len(header(row(1, 9, METRICS, "", 80))) <= 80
    usual = line(row(1, 9, METRICS, "3:20", 80)).split()
    assert usual[5:] == ["3.00", "1.20", "1.50", "0.30", "3:20"]  # rollout, update, all other phases


def test_a_log_file_gets_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress(Logger())  # standard output is no terminal here
    progress.begin(0, 2)
    for _ in range(1000):
        progress.phase("rollout", 256)
        progress.answered(1, 20)
    progress.end()
    assert capsys.readouterr().out == ""


def test_extreme_numbers_keep_their_columns_and_missing_ones_stop_nothing():
    wild = dict.fromkeys(METRICS, -1.23456789e9) | {"perf/tokens_per_s": 12_345_678.0, "time/rollout": 12345.678}
    big = line(row(99999, 100000, wild | {"kl": float("nan"), "reward": float("inf")}, "99:59:59"))
    assert " 12346k " in big
    assert " 12345.7 " in big
    assert len(big) <= 100
    assert set(line(row(1, 2, {}, "-")).split()) == {"1/2", "-"}


def test_a_column_of_scores_is_there_if_there_are_scores(capsys):
    without = {name: value for name, value in METRICS.items() if name != "accuracy"}
    progress = PlainProgress()
    progress.begin(0, 5)
    for step, metrics in enumerate([without, without, METRICS, METRICS, without], start=1):
        progress.step(step, 5, metrics)
    lines = [text.split() for text in capsys.readouterr().out.splitlines()]
    assert [number for number, words in enumerate(lines) if words[0] == "step"] == [0, 3, 6]
    assert ["acc" in lines[number] for number in (0, 3, 6)] == [False, True, False]
    assert {len(words) for words in lines[:3]} == {len(lines[0])}


def test_remaining_time(monkeypatch):
    now = 100.0
    monkeypatch.setattr("slurm_rlhf.observe.progress.time.monotonic", lambda: now)
    clock = Clock()
    assert duration(clock.remaining(5)) == "-"
    clock.tick()
    now += 60  # a first step that compiles
    clock.tick()
    assert duration(clock.remaining(5)) == "5:00"
    for _ in range(20):
        now += 2
        clock.tick()
    assert clock.remaining(5) == pytest.approx(10)
    assert duration(3 * 3600 + 61) == "3:01:01"


def test_plain_lines_are_a_table_with_a_header_now_and_then(capsys):
    progress = PlainProgress()
    progress.note("run directory runs/x, 45 steps")
    progress.begin(0, 45)
    for step in range(1, 46):
        progress.step(step, 45, METRICS | ({"eval": 0.8125} if step == 45 else {}))
    progress.end()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run directory runs/x, 45 steps"
    assert [number for number, text in enumerate(lines) if text == header(row(1, 9, METRICS, ""))] == [1, 22, 43]
    assert lines[2].startswith("     1/45   0.512  0.0123 0.750   2210   3.00    1.20")
    assert lines[2].split()[-1] != "-"  # the time left is known after one step
    assert lines[-1] == "          evaluation 0.8125"
    assert max(map(len, lines)) <= 100
    assert len(lines) == 1 + 3 + 45 + 1


PROGRAM = """
import sys, time
from slurm_rlhf.config.schema import Logger
from slurm_rlhf.observe.live import make_progress
progress = make_progress(Logger())
progress.note("run directory runs/x [not/markup], 30 steps")
progress.begin(0, 30)
for step in range(1, 4):
    progress.phase("rollout", 256)
    progress.answered(100, 3000)
    time.sleep(0.7)
    progress.answered(28, 1500)
    time.sleep(0.7)
    progress.phase("")
    progress.step(step, 30, eval(sys.argv[1]))
print("printed by somebody else")
progress.end()
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_gets_rows_over_bars(width: int) -> None:
    command = [sys.executable, "-c", PROGRAM, repr(METRICS)]
    raw = on_terminal(command, COLUMNS=str(width), TERM="xterm-256color", PYTHONPATH=str(ROOT))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw)
    assert "run directory runs/x [not/markup], 30 steps" in text
    assert text.count(header(row(1, 9, METRICS, "", width))) == 1
    rows = [text.index(f"    {step}/30   0.512  0.0123 0.750   2210   3.00") for step in (1, 2, 3)]
    assert rows == sorted(rows)
    assert "━━━━━" in text
    assert re.search(r"2/30 ━+.* 0:00:0\d elapsed, 0:\d\d left", text)
    assert re.search(r"  100/256 ━[━╸╺]+ 0:00:0\d rollout, \d+k? tokens/s", text)
    assert re.search(r"  128/256 ━[━╸╺]+ 0:00:0\d rollout, \d{4,5} tokens/s", text)
    assert "printed by somebody else" in text
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")  # the cursor is back
    assert max(len(part) for part in re.split(r"[\r\n]+", text)) <= width


TORCHRUN = """\

*****************************************
Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid ...
*****************************************
[rank1]:[W1120 21:44:48.787000000 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3)
Exception raised from sendBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:653 (most recent call first):
frame #0: c10::Error::Error(...) + 0x88 (0x7f1 in /lib/libc10.so)
Traceback (most recent call last):
  File "/home/user/reward.py", line 3, in <module>
    if bad: raise ValueError("real reason of the death")
            ^^^^^^^^^^^^^^^^^^
ValueError: real reason of the death
W1120 21:44:48.787000 29020 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 29025 ...
E1120 21:44:48.791000 29020 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/venv/torch/distributed/run.py", line 1032, in <module>
    main()
  File "/venv/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
crash.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_21:44:48
  rank      : 1 (local_rank: 1)
============================================================
"""


def test_the_tail_shows_the_reason_and_not_torchruns_report(tmp_path):
    path = tmp_path / "actor.log"
    path.write_text(TORCHRUN + "said afterwards\n")
    assert tail(path, 50) == [
        "Traceback (most recent call last):",
        '  File "/home/user/reward.py", line 3, in <module>',
        '    if bad: raise ValueError("real reason of the death")',
        "            ^^^^^^^^^^^^^^^^^^",
        "ValueError: real reason of the death",
        "said afterwards",
    ]
    assert tail(path, 2) == ["ValueError: real reason of the death", "said afterwards"]


def test_the_tail_of_what_holds_nothing_else(tmp_path):
    path = tmp_path / "actor.log"
    path.write_text(TORCHRUN[: TORCHRUN.index("Traceback")])
    assert tail(path, 1)[0].startswith("frame #0")
    path.write_text("Traceback (most recent call last):\n  File x\n")  # cut short by a kill
    assert tail(path, 5) == ["Traceback (most recent call last):", "  File x"]
    path.write_bytes(b"\n\n")
    assert tail(path, 5) == ["(it is empty)"]
    path.write_bytes(b"x" * 200_000 + b"\n\xff\xfelast\n")
    assert tail(path, 1) == ["\ufffd\ufffdlast"]
    assert "cannot be read: No such file" in tail(tmp_path / "none", 5)[0]


def test_the_tail_is_of_this_start_and_without_deprecations(tmp_path):
    path = tmp_path / "actor.log"
    path.write_text("RuntimeError: of three starts before\n")
    mark = path.stat().st_size
    assert tail(path, 5, mark) == ["(it is empty)"]
    warning = "/venv/torch/x.py:12: FutureWarning: `torch.y` is deprecated"
    noise = [
        *(warning, "  warnings.warn("),
        *(warning, "  return func(*args, **kwargs)"),
        *(warning, warning),
        "[W1124 23:28:53.977 Utils.hpp:137] Warning: Environment variable X is deprecated; use Y instead (function f)",
    ]
    with path.open("a") as file:
        file.write("\n".join([*noise, "  of two blanks", *noise, "ValueError: now", *noise, ""]))
    assert tail(path, 5, mark) == ["  of two blanks", "ValueError: now"]
