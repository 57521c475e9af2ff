"""The user's quota, as `quota` and `lfs quota` print it, and what preflight makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import first_on_path

from slurm_rlhf.nodes import needs
from slurm_rlhf.nodes.needs import Quota, quota_on, read_quota
from slurm_rlhf.run_directory import mount_of
from slurm_rlhf.wire import timeouts

NFS = """Disk quotas for user alice (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
/dev/sda2       4096       0       0       0      10       0       0       0
nas:/export/home   1000*    900    1500  1790000000    200     0     250       0
"""
LUSTRE = """     /lustre/project/a_name_so_long_that_it_has_a_line_of_its_own
                 [7000]       0   10000       -     950    1000       0       -
"""


@pytest.mark.parametrize(
    ("text", "place", "left"),
    [
        (NFS, "nas:/export/home", (500 * 1024, 50)),
        (NFS, "/dev/sda2", None),  # without limits
        (NFS, "/dev/sdb", None),
        (LUSTRE, "/lustre/project/a_name_so_long_that_it_has_a_line_of_its_own", (3000 * 1024, 50)),
        ("/scratch 500* 400 450 - 1 0 0 -\n", "/scratch", (0, None)),
        ("Disk quotas for user root (uid 0): none\n", "/dev/sda2", None),
        ("/scratch - - -\n", "/scratch", None),
        ("", "/scratch", None),
    ],
)
def test_what_the_programs_print(text: str, place: str, left: tuple[int, int | None] | None) -> None:
    assert read_quota(text, place, "quota") == (None if left is None else Quota("quota", *left))


def test_the_programs_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file system wants it; none of them, or one that does not answer, is no error."""
    answers = '[ "$1 $2 $3" = "quota -q -u" ] && echo "$5 100 0 400 - 1 0 0 -"\nexit 1'
    monkeypatch.setattr(needs, "mount_of", lambda path: ("", Path("/scratch"), "lustre"))
    first_on_path(monkeypatch, tmp_path, lfs=answers)
    assert quota_on(tmp_path) == Quota("lfs quota", 300 * 1024, None)
    first_on_path(monkeypatch, tmp_path, lfs="exec sleep 60")
    monkeypatch.setattr(timeouts, "QUOTA_S", 0.2)
    assert quota_on(tmp_path) is None
    (tmp_path / "lfs").unlink()
    assert quota_on(tmp_path) is None


def test_the_device_of_a_mount(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    nested = "nas:/export/my\\040home /my\\040home nfs4 rw 0 0\nfs /my\\040home/c tmpfs rw 0 0\n"
    table.write_text(f"/dev/sda1 / ext4 rw 0 0\n{nested}")
    assert mount_of(Path("/my home/data"), table) == ("nas:/export/my home", Path("/my home"), "nfs4")
    assert mount_of(Path("/my home/c/d"), table) == ("fs", Path("/my home/c"), "tmpfs")
    assert mount_of(Path("/other"), table) == ("/dev/sda1", Path("/"), "ext4")
    assert mount_of(Path("/other"), tmp_path / "none") == ("", Path("/"), "")
