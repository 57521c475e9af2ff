from __future__ import annotations
import json
class Reporting:
    def __init__(self, config, directory, worlds): self.d = directory; self.worlds = worlds
    def note(self, text): print(text, flush=True)
    def begin(self, state, total, checkpoint): print("begin", state, total, checkpoint, flush=True)
    def step(self, n, total, m):
        open(self.d.metrics, "a").write(json.dumps({"step": n, **m}) + "\n"); print(n, {k: round(v, 4) for k, v in m.items()}, flush=True)
    def finished(self, state): print("finished", state, flush=True)
    def failed(self, e): print("failed", repr(e)[:3000], flush=True)
