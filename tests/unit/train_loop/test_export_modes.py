"""Who may read an exported model."""

from __future__ import annotations

import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from steadytrain.components.train.loop.export import write_model


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
