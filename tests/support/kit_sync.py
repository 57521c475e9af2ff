"""Checks of the acceptance kit: weights on their way, by NCCL and by CUDA IPC."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from kit import Finding, Place
from kit_gpus import GPUS, device, gpu_environment
from sync_fleet import Fleet
from sync_peer import hold, make_weights

from slurm_rlhf.errors import SyncBroken

ACTORS, ENGINES = 2, 2
DYING = 2.0
"""Seconds until the rank that is to die does so, in an update whose other actor rank takes its time."""


def nccl(place: Place) -> Finding:
    """`test_sync_backends.test_conformance` between ranks with a GPU each, or several on one."""
    return _conform(place, place.backend("nccl"))


def ipc(place: Place) -> Finding:
    """The same, all ranks on the first GPU."""
    if not place.rehearse:
        os.environ[GPUS] = place.gpus[0]
    return _conform(place, "ipc")


def repair(place: Place) -> Finding:
    """An engine rank is killed amid an update; those that are left get the same version over a new group."""
    options = {"backend": place.backend("nccl"), "directory": place.scratch}
    fleet = _fleet()
    try:
        sender = fleet.sender(ENGINES, actors=ACTORS, zero=3, **options)
        fleet.update(sender, 1)
        slow, dying, fine = fleet.peers
        slow.tell("push", version=2, seed=2, seconds=0.2)
        dying.tell("update", version=2, at=2, act="die")
        fine.tell("update", version=2)
        with pytest.raises(SyncBroken, match=rf"pid {dying.pid}\) died"):
            sender.push(hold(make_weights(2), 0, ACTORS), 2)
        began = time.monotonic()
        for peer in (slow, fine):
            stated = peer.answer()
            assert stated.get("error") == "SyncBroken", f"a survivor heard {stated}"
        fleet.peers.remove(dying)
        dying.end()
        sender = fleet.sender(ENGINES - 1, actors=ACTORS, zero=3, **options)
        fleet.update(sender, 2)  # compares every byte
        seconds = time.monotonic() - began
        backend = sender.group.backend
    finally:
        fleet.end()
    return Finding(f"repeated over {backend} {seconds:.1f} s after the death", {"repair_s": seconds})


def _conform(place: Place, backend: str) -> Finding:
    from sync_conformance import conform

    fleet = _fleet()
    try:
        conform(fleet, Path(place.scratch, "sync"), backend)
        fleet.dismiss()
        sender = fleet.sender(ENGINES, actors=ACTORS, zero=3, backend=backend, directory=place.scratch)
        began = time.monotonic()
        fleet.update(sender, 9)  # small and with hashing, so no measure of the link
        rate = sender.plan.payload / (time.monotonic() - began)
    finally:
        fleet.end()
    ranks = f"{ACTORS} + {ENGINES} ranks on {len(place.gpus[:4]) if backend == 'nccl' else 1} GPU"
    where = "ranks on CPUs" if place.rehearse else ranks
    return Finding(f"{backend}: every byte arrived, {where}", {"backend": backend, "bytes_per_s": rate})


def _fleet() -> Fleet:
    """This process is the first rank: it takes the first GPU before anything looks for a GPU."""
    os.environ.update(gpu_environment(0))
    if device() == "cuda":
        import torch

        torch.cuda.set_device(0)
    return Fleet(warm=False)
