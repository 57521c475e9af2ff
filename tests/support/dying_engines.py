"""An engine of a whole run that kills itself, once in the middle of a batch and once in the middle of an update.

Each time the reward function waits from then on, until the test lets it go: so an engine can come back before the run,
whose steps take tenths of a second, is over.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from patched_ranks import patched_engines
from training_runs import Run

DYING = """
import os, signal, time
from pathlib import Path

PLACE = Path({place!r})

def die(when):
    (PLACE / "hold").mkdir(exist_ok=True)
    (PLACE / "hold" / "reward-hang").touch()
    (PLACE / when).write_text(str(time.time()))
    os.kill(os.getpid(), signal.{number})

def once(when):
    return not (PLACE / when).exists()

def change(module):
    step, load = module.VllmEngine.step, module.VllmEngine.load

    def dying_step(engine):
        landed = step(engine)
        status = engine.status
        if status.version == 1 and status.unfinished and status.sampled > 60 and once("generation"):
            die("generation")
        return landed

    def dying_load(engine, weights, version):
        def some(weights):
            for number, each in enumerate(weights):
                if number == 3 and version == 2 and once("update"):
                    die("update")
                yield each
        return load(engine, some(weights), version)

    module.VllmEngine.step, module.VllmEngine.load = dying_step, dying_load
"""


def dying_engine(place: Path, rank: str = "1", number: str = "SIGKILL") -> AbstractContextManager[None]:
    """The engine of this local rank dies twice, in runs in `place` that start within it."""
    return patched_engines(place / "dying", DYING.format(place=str(place), number=number), (rank,))


def wait_until_started(run: Run, engine: int, times: int) -> None:
    """Until an engine has started so often."""
    run.wait_until(lambda: run.log().count(f"engine {engine} has started") >= times, f"start {times} of the engine")
