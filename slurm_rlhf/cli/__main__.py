"""Run `slurm-rlhf` as `python -m slurm_rlhf.cli`, for processes that know only their interpreter."""

import sys

from slurm_rlhf.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
