"""Break small runs of a tiny random model on this machine's CPUs, and tell what each fault did.

    python tests/lab/fault_campaign.py --faults=60 --seed=0

Processes of each role are killed and stopped in each phase, checkpoints damaged, the disk filled, the
control port attacked, the reward function and collectives held up, the clock set. For each fault campaign.json
says how soon it was noticed, whether the culprit was named, how the run went on, whether its metrics are
those of an undisturbed run, and what was left behind. Faults of a cluster: bash tests/run.sh -m campaign.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from slurm_rlhf.cli.main import guarded

sys.path.append(str(Path(__file__).parents[1] / "support"))

import task
import warm_runs
from campaign.draw import draw, runnable
from campaign.faults import all_faults
from campaign.leader import Leader, ThisMachine
from campaign.result import carried_out
from campaign.warm import WarmStart


def main(words: list[str] | None = None) -> int:
    """Draw faults, do them, write the table. Returns 1 if a fault was not borne as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60, help="how many; each kind, target and phase comes once first")
    parser.add_argument("--seed", type=int, default=0, help="seed of faults and of their moments")
    parser.add_argument("--out", type=Path, default=Path("campaign"), help="a new directory for the runs and the table")
    options = parser.parse_args(words)
    return guarded(lambda: _campaign(options))


def _campaign(options: argparse.Namespace) -> int:
    drawn = draw(runnable(all_faults()), options.faults, options.seed)
    out = options.out.absolute()
    task.make_new(out)
    # As Ctrl-C: what is running is ended first, and small disks are unmounted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = Leader(out, ThisMachine(WarmStart(out), options.seed), options.seed).run(drawn)
    try:
        return 0 if all(row.good for row in carried_out(rows, options.seed, out)) else 1
    finally:
        warm_runs.end()


if __name__ == "__main__":
    sys.exit(main())
