"""The command in a folder of its own, and data for trainings without it."""

from __future__ import annotations

import pytest

from support.command import Command
from support.training import language_rows, write_data

_SHARED_RUNS = ("lm", "quiet")


def pytest_collection_modifyitems(items):
    """What shares a costly run goes to one worker, and first, since it takes longest."""
    for item in items:
        for name in set(_SHARED_RUNS) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture
def steadytrain(tmp_path):
    return Command(tmp_path / "output")


@pytest.fixture(scope="module")
def shared_steadytrain(tmp_path_factory):
    return Command(tmp_path_factory.mktemp("shared") / "output")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Prepared rows of a small language."""
    return write_data(tmp_path_factory.mktemp("data"), language_rows(60), language_rows(8, seed=1))
