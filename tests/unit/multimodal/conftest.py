from __future__ import annotations

import pytest

from steadytrain.components.preprocess.step import run as preprocess

from support.benches import one_thread
from support.mixed import mixed_config, write_mixed

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def prepared_mixed(tmp_path_factory):
    """Return a table of 400 records with images, and its prepared data."""
    table = write_mixed(tmp_path_factory.mktemp("mixed") / "data", 400)
    return table, preprocess(mixed_config(table))


@pytest.fixture
def bench(prepared_mixed, tmp_path):
    """Return a function that makes a run on the table."""
    from support.training import Bench

    table, data = prepared_mixed

    def made(*overrides, root=tmp_path):
        return Bench(root, data, mixed_config(table, *overrides, f"output={root}"))

    return made
