"""`python -m slurm_rlhf.cli`: the same as `slurm-rlhf`, for processes that know their interpreter only."""

import sys

from slurm_rlhf.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
