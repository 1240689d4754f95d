"""A pipeline that fails on a full disk, where it can't write anything about the failure."""

from __future__ import annotations

import contextlib

import pytest

from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.local import _unexplained

from support.disks import small_file_system


@pytest.fixture
def small_disk(tmp_path):
    """A 4 MB file system."""
    with small_file_system(tmp_path / "disk", "size=4m,nr_inodes=8") as place:
        yield place


@pytest.mark.parametrize("lacks", ["bytes", "inodes"])
def test_command_reports_that_the_disk_is_full(small_disk, lacks):
    workspace = Workspace(small_disk, "tiny")
    assert "exit status 1" in _unexplained(workspace, 1).message
    for number in range(20):
        with contextlib.suppress(OSError):
            (small_disk / str(number)).write_bytes(b"x" * (1 << 20 if lacks == "bytes" else 0))
    failed = _unexplained(workspace, 1)
    assert failed.message == f"no space left on the disk of {small_disk}"
    assert "free space" in failed.remedy
