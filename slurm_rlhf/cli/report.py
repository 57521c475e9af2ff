"""Run `slurm-rlhf report RUN [RUN ...]`: write the page that shows a run, or several beside each other."""

from __future__ import annotations

from pathlib import Path

from slurm_rlhf.cli.main import Command, take_options
from slurm_rlhf.cli.status import find
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.run_directory import RunDirectory

USAGE = "usage: slurm-rlhf report RUN [RUN ...] [--output=FILE]"
OPTIONS = {
    "output": "where the page goes [report.html in the directory of the run; of several runs: in this directory]"
}


def run(words: list[str]) -> int:
    """Write the page and print where it is. Raises ConfigError when a RUN names no run."""
    given, names = take_options(words, OPTIONS, USAGE)
    if not names:
        raise ConfigError(f"report takes run directories or job numbers\n{USAGE}")
    output = Path(given["output"]).expanduser().absolute() if "output" in given else None
    directories = [_directory(name) for name in names]
    from slurm_rlhf.report.page import write_page, write_report
    from slurm_rlhf.report.run_files import RunFiles

    if len(directories) == 1 and output is None:
        write_report(directories[0])
        output = directories[0].report
    else:
        output = output or Path("report.html").absolute()
        if not output.parent.is_dir():
            raise ConfigError(f"--output={output}: there is no directory {output.parent}")
        write_page(output, [RunFiles.read(directory) for directory in directories])
    print(f"{output} ({output.stat().st_size / 1e6:.1f} MB): open it in a browser, here or after scp")
    return 0


def _directory(name: str) -> RunDirectory:
    found = find(name)
    if found.directory is None:
        raise ConfigError(f"the directory of job {name} is not known: give the run directory in its place")
    return RunDirectory(found.directory)


COMMANDS = {
    "report": Command(
        USAGE,
        "Writes a page that shows a run: curves, times, who computed and who waited, samples, events, the "
        "configuration. It is one file that needs no network. Of several runs it shows the curves in one plot each "
        "(runs that differ in nothing but their seed: mean and range), and where their configurations differ. A run "
        "writes its own report.html as it goes on (logger.report_steps).",
        run,
        OPTIONS,
    ),
}
