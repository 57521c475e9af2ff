"""The key file: private, whole, and the run's own."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.wire.auth import RunKeys


def test_keys_are_private_and_the_same_after_loading(tmp_path: Path) -> None:
    path = tmp_path / "run" / "keys.json"
    previous = os.umask(0)
    try:
        keys = RunKeys.create(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RunKeys.load(path) == keys
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)
    assert os.listdir(path.parent) == ["keys.json"]


def test_every_run_has_other_keys_and_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first, second = RunKeys.create(path), RunKeys.create(path)
    assert not set(vars_of(first)) & set(vars_of(second))
    assert RunKeys.load(path) == second


def vars_of(keys: RunKeys) -> list[str]:
    return [keys.server_public, keys.server_secret, keys.client_public, keys.client_secret]


def test_a_link_in_the_files_place_is_replaced_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    (tmp_path / "keys.json").symlink_to(elsewhere)
    RunKeys.create(tmp_path / "keys.json")
    assert elsewhere.read_text() == "precious"
    RunKeys.load(tmp_path / "keys.json")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    RunKeys.create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="open to other users"):
        RunKeys.load(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    RunKeys.create(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
        RunKeys.load(path)


def test_missing_linked_piped_and_foreign_files_are_refused(tmp_path: Path) -> None:
    RunKeys.create(tmp_path / "keys.json")
    (tmp_path / "link").symlink_to(tmp_path / "keys.json")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (("missing", "No such file"), ("link", "cannot be read"), ("pipe", "not a regular file")):
        with pytest.raises(ConfigError, match=why):
            RunKeys.load(tmp_path / name)


def test_damaged_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    RunKeys.create(path)
    good = json.loads(path.read_text())
    swapped = {**good, "client_public": good["server_public"]}
    damaged = ["", "{}", "[]", "null", path.read_text()[:-20], json.dumps(swapped)]
    damaged += [json.dumps({**good, "server_secret": value}) for value in ("short", 3, "é" * 40)]
    for content in damaged:
        path.write_text(content)
        with pytest.raises(ConfigError, match="holds no keys"):
            RunKeys.load(path)
