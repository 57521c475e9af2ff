"""The process that renders a chat template ends with the one that asked it, however that ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S

PARENT = """
import os, signal, sys
from slurm_rlhf.data.chat_template import ChatTemplate
made = ChatTemplate("{{{{ messages[0].content }}}}", {{}}, "template")
cycle = {{"made": made}}
cycle["cycle"] = cycle  # only the collector of garbage would find it
made.render([{{"role": "user", "content": "hello"}}], "here")
print(made._process.pid, flush=True)
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_it_ends_with_its_parent(end: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    program = [sys.executable, "-c", PARENT.format(end=end)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout.strip().isdigit(), done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(HANG_S)
