from __future__ import annotations

import pytest

from support.benches import one_thread
from support.pictures import digits, image_config, prepared, write_folders

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def prepared_digits(tmp_path_factory):
    """Return the folder of 600 real digits, and their prepared data."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = (part[:600] for part in digits())
    source = write_folders(folder / "images", images, labels)
    return source, prepared(source)[1]


@pytest.fixture
def bench(prepared_digits, tmp_path):
    """Return a function that makes a run on the digits."""
    from support.training import Bench

    source, data = prepared_digits

    def made(*overrides, root=tmp_path):
        config = image_config(source, *overrides, f"output={root}", "compute.threads_per_rank=1")
        return Bench(root, data, config)

    return made
