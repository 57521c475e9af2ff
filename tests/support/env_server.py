"""Serves environments as the command does, in a process that a test may kill."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


class EnvServer:
    """Serves the file until `kill`."""

    def __init__(self, file: Path, *arguments: str) -> None:
        self.file, self.arguments, self.port, self.url = file, arguments, 0, ""
        self.start()

    def start(self) -> None:
        """Serve; after `kill` at the same port."""
        command = [sys.executable, "-m", "slurm_rlhf.cli", "serve-env", str(self.file), "--workers=2"]
        self.process = subprocess.Popen(
            [*command, f"--port={self.port}", "--", *self.arguments],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        found = re.search(r"on (http://\S+:(\d+))", self.process.stdout.readline())
        assert found
        self.url, self.port = found[1], int(found[2])

    def kill(self) -> None:
        """End the process at once; the kernel ends its workers."""
        self.process.kill()
        self.process.communicate()
