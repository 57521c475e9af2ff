"""Receivers of weight updates that all tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sync_fleet import Fleet


@pytest.fixture(scope="module")
def all_peers() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.end()


@pytest.fixture
def fleet(all_peers: Fleet) -> Iterator[Fleet]:
    """Give the test receivers, and keep those that it leaves alive for the next one."""
    yield all_peers
    all_peers.dismiss()
