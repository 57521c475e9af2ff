"""The page in a real browser: three widths, light and dark; what it draws, says, and does with hostile texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from browser import Page, open_page
from recorded_run import SPITE, write_run

from slurm_rlhf.cli.main import main
from slurm_rlhf.observe.run_status import append_metrics
from slurm_rlhf.report.page import write_page
from slurm_rlhf.run_directory import RunDirectory

pytestmark = [pytest.mark.slow]

WIDTHS = ((375, 812), (1280, 800), (1920, 1080))
BARE = "[...document.querySelectorAll('[data-plot]')].filter(p => !p.querySelector('.mark')).map(p => p.dataset.plot)"
PLOTS = "[...document.querySelectorAll('[data-plot]')].map(p => p.dataset.plot)"
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"
CONTRAST = """
(() => {
  const linear = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map((each) => linear(each / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(document.body);
  const pair = [light(style.color), light(style.backgroundColor)].sort();
  return [(pair[1] + 0.05) / (pair[0] + 0.05), light(style.backgroundColor)];
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunDirectory]:
    """Two seeds of one run, and one with another key."""
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / "first", seed=1),
        write_run(root / "second", seed=2),
        write_run(root / "other", seed=1, max_epochs=3),
    ]


@pytest.fixture
def opened(browser: Page, runs: list[RunDirectory]) -> Iterator[Page]:
    """The page of the first run, of whose console nothing is heard; a dialog would be a complaint, too."""
    assert main(["report", str(runs[0].root)]) == 0
    browser.open(runs[0].report, 1280, 800, False)
    yield browser
    assert browser.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", WIDTHS, ids=lambda size: str(size[0]))
def test_every_plot_has_marks_and_the_console_is_silent(
    browser: Page, runs: list[RunDirectory], size: tuple[int, int], dark: bool, tmp_path: Path
) -> None:
    assert main(["report", str(runs[0].root)]) == 0
    copied = tmp_path / "elsewhere.html"  # no other file is there
    shutil.copy(runs[0].report, copied)
    browser.open(copied, *size, dark)
    assert browser.complaints == []
    assert browser.requests == [copied.as_uri()]
    assert browser.value(BARE) == []
    plots = browser.value(PLOTS)
    assert {"Reward", "Evaluation", "The last steps", "Ranks", "Time axis", "Rewards of the samples"} <= set(plots)
    assert len(plots) >= 20
    assert browser.value(OVERFLOW) <= 0
    contrast, light = browser.value(CONTRAST)
    assert contrast > 7
    assert (light < 0.1) == dark


def test_the_page_follows_its_width(opened: Page) -> None:
    wide = "Math.max(...[...document.querySelectorAll('[data-plot] svg')].map(p => p.viewBox.baseVal.width))"
    assert opened.value(wide) > 600
    opened.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
    opened.value(FRAME)
    opened.value(FRAME)
    assert opened.value(wide) <= 400
    assert opened.value(OVERFLOW) <= 0
    assert opened.value(BARE) == []


def test_a_response_that_holds_html_is_shown_as_it_is(opened: Page) -> None:
    search = "document.querySelector('#samples input')"
    opened.value(f"{search}.value = 'ONERROR', {search}.dispatchEvent(new Event('input')), 0")
    shown = opened.value("[...document.querySelectorAll('#sample-list pre.response')].map(p => p.textContent)")
    assert shown == [SPITE]
    assert opened.value("document.querySelector('#sample-list mark').textContent") == "onerror"
    assert opened.value("document.querySelectorAll('img, #sample-list b').length") == 0
    assert opened.value("document.scripts.length") == 2


def test_failed_prompts_of_an_evaluation_are_shown(opened: Page) -> None:
    titles = opened.value("[...document.querySelectorAll('#evaluation > .card > h3')].map(h => h.textContent)")
    assert titles == ["step 30", "mine"]
    cells = opened.value("[...document.querySelectorAll('#evaluation tbody tr')[0].cells].map(c => c.textContent)")
    assert cells[:3] == ["sums", "12", "2 t=0.7"]
    assert cells[3].startswith("0.6667 [")
    failures = opened.value("[...document.querySelectorAll('#evaluation pre.response')].map(p => p.textContent)")
    assert failures == [SPITE] * 8


def test_a_stage_shows_its_losses_and_nothing_of_engines(browser: Page, tmp_path: Path) -> None:
    stage = RunDirectory(tmp_path / "out.run")
    stage.root.mkdir()
    for step in range(1, 5):
        measured = {"eval/accuracy": 0.9} if step == 4 else {}
        append_metrics(stage.metrics, step, {"loss": 1 / step, "preferred": 0.5, "time/step": 2.0, **measured})
    write_page(stage.report, [stage])
    browser.open(stage.report, 1280, 800, False)
    assert browser.value("[...document.querySelectorAll('main h2')].map(h => h.textContent)") == [
        *("Curves", "Where the time goes", "Configuration")
    ]
    assert browser.value(PLOTS)[:2] == ["Loss", "Pairs in the right order"]
    tiles = browser.value("[...document.querySelectorAll('.tile')].map(t => t.textContent)")
    assert tiles[1:3] == ["1 → 0.25loss, first → last step", "8 stime of the steps"]
    assert browser.complaints == []


def test_tokens_are_coloured_by_their_log_probs(opened: Page) -> None:
    coloured = "[...document.querySelectorAll('#sample-list .token')].filter(t => t.style.background).length"
    assert opened.value(coloured) > 20
    chooser = "document.querySelectorAll('#samples select')[1]"
    opened.value(f"{chooser}.value = 'no colour', {chooser}.dispatchEvent(new Event('input')), 0")
    assert opened.value(coloured) == 0


def test_words_of_an_environment_are_grey(opened: Page) -> None:
    seen = "[...new Set([...document.querySelectorAll('#sample-list .token%s')].map(t => getComputedStyle(t).color))]"
    grey, usual = opened.value(seen % ".observed"), opened.value(seen % ":not(.observed)")
    assert (len(grey), len(usual), grey != usual) == (1, 1, True)
    soft = "getComputedStyle(document.querySelector('#samples .soft')).color"
    assert grey == [opened.value(soft)]
    words = "[...document.querySelectorAll('#sample-list .observed')].map(t => t.textContent)"
    assert opened.value(words)[0] == "is "


def test_stops_and_requeues_stand_on_the_time_axis_and_in_the_curves(opened: Page) -> None:
    for kind in ("start", "stop", "requeue", "resume", "warning", "checkpoint", "finish"):
        assert opened.value(f"document.querySelectorAll('#history svg [data-event={kind}]').length") == 1
    assert opened.value("document.querySelectorAll('#history svg rect.mark').length") == 2  # sessions
    assert opened.value("document.querySelector('[data-plot=Reward] svg').querySelectorAll('.event').length") == 4


def test_several_runs_share_plots_and_show_where_they_differ(
    browser: Page, runs: list[RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "compared.html"
    assert main(["report", *(str(run.root) for run in runs), f"--output={output}"]) == 0
    assert str(output) in capsys.readouterr().out
    browser.open(output, 1280, 800, False)
    assert browser.complaints == []
    assert browser.value(BARE) == []
    reward = "document.querySelector('[data-plot=Reward] svg')"
    assert browser.value(f"{reward}.querySelectorAll('path.line').length") == 4  # two seeds, their mean, another run
    assert browser.value(f"{reward}.querySelectorAll('path.area').length") == 1  # the range of the seeds
    assert len(browser.value(PLOTS)) == len(set(browser.value(PLOTS)))
    said = {name for name in browser.value(PLOTS) if name.startswith(("Reward", "Eval", "KL", "Engine"))}
    log_probs = "Engine against actor: difference of log-probs"
    assert said == {
        *("Reward", "Evaluation", "KL to the reference", f"{log_probs}: mean", f"{log_probs}: largest"),
        "Rewards of the samples",
    }
    differ = browser.value(
        "[...document.querySelectorAll('#settings tr.differs td:first-child')].map(c => c.textContent)"
    )
    assert differ == ["run_dir", "train.max_epochs", "train.seed"]
    assert json.loads(runs[0].summary.read_text())["status"] == "finished"


LINES = "[...document.querySelectorAll('[data-plot={}] path.line')].map(p => p.getAttribute('d'))"
MARKS = "[...document.querySelectorAll('[data-plot={}] svg > text[text-anchor=middle]')].map(t => t.textContent)"
KEYS = "[...document.querySelectorAll('[data-plot={}] + .legend span')].map(s => s.textContent)"
FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def choose(browser: Page, control: str, value: object, event: str) -> None:
    """Set a control of the curves as a user does, and wait until they are drawn."""
    browser.value(f"(c => {{ c.value = {json.dumps(value)}; c.dispatchEvent(new Event('{event}')) }})({control}), 0")
    browser.value(FRAME)


def test_curves_are_smoothed_over_steps_tokens_or_time(opened: Page) -> None:
    line, marks = LINES.format("Entropy"), MARKS.format("Entropy")
    (raw,) = opened.value(line)
    over_steps = opened.value(marks)
    assert over_steps[-1] == "30"
    choose(opened, "document.querySelector('#view input')", 0.9, "input")
    thin, soft = opened.value(line)
    assert thin == raw  # the measured line stays behind the smoothed one

    def detour(line: str) -> float:
        heights = [float(point.split()[1]) for point in line.replace("M", "L").split("L")[1:]]
        return sum(abs(one - other) for one, other in pairwise(heights)) - abs(heights[-1] - heights[0])

    assert detour(soft) < detour(raw) / 4
    choose(opened, "document.querySelector('#view input')", 0, "input")
    axis = "document.querySelector('#view select')"
    choose(opened, axis, "tokens", "change")
    assert opened.value(marks)[-1].endswith("M")  # 30 steps of 60,000 tokens
    assert opened.value(line) != [raw]
    choose(opened, axis, "seconds", "change")
    assert opened.value(marks)[-1].endswith("min")  # 30 steps of 9 s
    choose(opened, axis, "steps", "change")
    assert opened.value(line) == [raw]


def test_a_part_of_the_curves_is_zoomed_to(browser: Page, runs: list[RunDirectory]) -> None:
    assert main(["report", str(runs[0].root)]) == 0
    browser.open(runs[0].report, 1280, 2000, False)
    (whole,) = browser.value(LINES.format("Reward"))
    box = "document.querySelector('[data-plot=Entropy]').getBoundingClientRect()"
    left, top, width, height = browser.value(f"(b => [b.left, b.top, b.width, b.height])({box})")

    def mouse(kind: str, share: float, clicks: int = 1) -> None:
        place = {"x": left + share * width, "y": top + height / 2}
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=clicks, **place)

    mouse("mousePressed", 0.5)
    mouse("mouseMoved", 0.7)
    assert browser.value("document.querySelector('[data-plot=Entropy] .zoom').getAttribute('width')") > "0"
    mouse("mouseReleased", 0.7)
    browser.value(FRAME)
    (zoomed,) = browser.value(LINES.format("Reward"))  # all curves show the same steps
    assert zoomed != whole
    marks = [int(mark) for mark in browser.value(MARKS.format("Reward"))]
    assert 10 < marks[0] < marks[-1] < 24
    button = "document.querySelector('#view button')"
    assert not browser.value(f"{button}.hidden")
    mouse("mouseMoved", 0.6)  # the tip tells a step of the part that is seen
    assert 10 < int(browser.value("document.querySelector('#tip b').textContent").removeprefix("step ")) < 24
    for clicks in (1, 2):
        mouse("mousePressed", 0.6, clicks)
        mouse("mouseReleased", 0.6, clicks)
    browser.value(FRAME)
    assert browser.value(LINES.format("Reward")) == [whole]
    assert browser.value(f"{button}.hidden")
    assert browser.complaints == []


def test_a_line_is_drawn_once_and_rewards_have_bands(opened: Page) -> None:
    """The mean over one data set is that of the set, and rewards may be the scores: one line, with both names."""
    for plot, areas in (("Reward", 2), ("Evaluation", 0)):
        assert len(opened.value(LINES.format(plot))) == 1
        assert opened.value(KEYS.format(plot)) == []
        assert opened.value(f"document.querySelectorAll('[data-plot={plot}] path.area').length") == areas
    about = "document.querySelector('[data-plot=Evaluation]').parentNode.querySelector('figcaption').title"
    assert opened.value(about) == "eval, eval/sums/mean"
    more = opened.value("document.querySelector('#curves details summary').textContent")
    assert more == "4 more metrics"  # response_tokens, correction/ess, two of the sync; not what the bands are made of


def test_charts_of_a_correction_are_there_where_something_is_corrected(
    browser: Page, runs: list[RunDirectory], tmp_path: Path
) -> None:
    found = {}
    for preset in ("auto", "tis"):
        run = RunDirectory(tmp_path / preset)
        shutil.copytree(runs[0].root, run.root)
        text = run.config.read_text()
        assert 'preset = "auto"' in text
        run.config.write_text(text.replace('preset = "auto"', f'preset = "{preset}"'))
        assert main(["report", str(run.root)]) == 0
        browser.open(run.report, 1280, 800, False)
        found[preset] = [name for name in browser.value(PLOTS) if name.startswith("Correction")]
        stated = browser.value("document.querySelector('#curves').textContent")
        assert ("algo.correction weighs nothing" in stated) == (preset == "auto")
    assert found == {"auto": [], "tis": ["Correction: effective sample size"]}


def test_a_kl_that_was_not_measured_has_no_curve(browser: Page, runs: list[RunDirectory], tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(runs[0].root, run.root)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "kl"}) + "\n" for row in rows))
    assert main(["report", str(run.root)]) == 0
    browser.open(run.report, 1280, 800, False)
    assert "KL to the reference" not in browser.value(PLOTS)
    stated = browser.value("document.querySelector('#curves p.small').textContent")
    assert "KL to the reference (no reference: algo.kl.init_coef = 0)" in stated
