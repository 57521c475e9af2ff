"""Rules that every backend of weight sync keeps, whoever asks: the tests on CPUs, the acceptance kit on GPUs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sync_fleet import Fleet
from sync_peer import hold, make_weights

from slurm_rlhf.errors import SyncBroken, SyncError


def conform(fleet: Fleet, tmp_path: Path, backend: str) -> None:
    """Bytes of two updates; an abort wakes those who wait; a death is noticed, and a new group works."""
    options = {"backend": backend, "directory": str(tmp_path)}
    sender = fleet.sender(2, actors=2, zero=3, **options)
    assert sender.group.backend == backend
    for version in (1, 2):
        fleet.update(sender, version)
    waiting = fleet.peers[1:]
    for peer in waiting:
        peer.tell("update", version=3)
    threading.Timer(0.3, sender.group.abort, ("the conductor ends the run",)).start()
    with pytest.raises(SyncError, match="the conductor ends the run"):
        sender.push(hold(make_weights(3), 0, 2), 3)  # the other actor rank never sends
    for peer in waiting:
        answer = peer.answer()
        assert "the conductor ends the run" in answer.get("message", ""), f"an engine heard {answer}"

    sender = fleet.sender(2, actors=2, zero=3, **options)
    slow, dying, fine = fleet.peers
    slow.tell("push", version=4, seed=4, seconds=0.3)
    dying.tell("update", version=4)
    fine.tell("update", version=4)
    threading.Timer(0.5, dying.process.kill).start()
    with pytest.raises(SyncBroken, match=rf"rollout 0 on n \(pid {dying.pid}\) died") as caught:
        sender.push(hold(make_weights(4), 0, 2), 4)
    assert "rollout 1" not in str(caught.value)
    with pytest.raises(SyncError, match="has ended"):
        sender.push(hold(make_weights(4), 0, 2), 5)
    for peer in (slow, fine):
        answer = peer.answer()
        assert (answer["error"], f"pid {dying.pid}" in answer["message"]) == ("SyncBroken", True)
    fleet.peers.remove(dying)
    dying.end()
    sender = fleet.sender(1, actors=2, zero=3, **options)
    fleet.update(sender, 5)
    sender.group.close()
    for peer in fleet.peers:
        peer.tell("leave")
        peer.answer()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "files are left"
