"""Who may read an exported model, and an export to a full disk."""

from __future__ import annotations

import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.train.loop.export import write_model

from support.disks import small_file_system


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_umask_decides_who_may_read_the_weights(tmp_path, umask, mode):
    def write(folder):
        save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")

    before = os.umask(umask)
    try:
        write_model(write, tmp_path / "model")
    finally:
        os.umask(before)
    file = tmp_path / "model" / "model.safetensors"
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_full_disk_is_a_storage_error_and_nothing_is_left(tmp_path):
    """safetensors raises an error of its own."""

    def write(folder):
        save_file({"weight": torch.zeros(2**16)}, folder / "model.safetensors")

    with small_file_system(tmp_path / "disk", "size=64k") as disk:
        with pytest.raises(StorageError, match=f"cannot be written to {disk}/model.*No space"):
            write_model(write, disk / "model")
        assert not list(disk.iterdir())
