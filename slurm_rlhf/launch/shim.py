"""`python -m slurm_rlhf.launch.shim PARENT_PID COMMAND...`: become COMMAND, but never outlive the parent.

A launcher that is killed outright thereby leaves no torchrun behind, and no worker either: those do the same.
"""

from __future__ import annotations

import os
import sys

from slurm_rlhf.cluster.parent import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
