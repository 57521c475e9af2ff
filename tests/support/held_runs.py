"""An engine that a test makes hang and lets go again, as `campaign.holds` does with the rest of a run."""

ENGINE = """
import time
from pathlib import Path

def change(module):
    step = module.VllmEngine.step
    def endless_step(engine):
        while (Path({hold!r}) / "engine").exists():
            time.sleep(0.02)
        return step(engine)
    module.VllmEngine.step = endless_step
"""
