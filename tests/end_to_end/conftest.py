"""The command in its own folder, and data for training runs that don't use the command."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("support.times", "support.soak", "support.agreement")

from support.command import Command  # noqa: E402  imports modules registered above
from support.isolation import forgetful, isolated  # noqa: E402
from support.stores import empty_store, with_store  # noqa: E402

__all__ = ["empty_store", "forgetful", "isolated"]

_LONGEST = (
    "test_automl",
    "test_series",
    "test_presets",
    "test_strategies",
    "test_recovery",
    "test_stop_anywhere",
    "test_stop",
    "test_bad_input",
    "test_soak",
    "test_outside",
    "test_device_memory",
    "test_images",
    "test_keras",
    "test_multimodal",
)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    """Mark all but the core as slow, and start the slowest files first."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("core"):
            item.add_marker("slow")
    order = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture
def steadytrain(tmp_path, empty_store):
    """Return a command whose output has a store, which takes seconds to make, and no run."""
    return Command(with_store(tmp_path / "output", empty_store))


@pytest.fixture(scope="module")
def shared_steadytrain(tmp_path_factory, empty_store):
    return Command(with_store(tmp_path_factory.mktemp("shared") / "output", empty_store))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Return prepared rows of a small language."""
    from support.training import language_rows, write_data

    return write_data(tmp_path_factory.mktemp("data"), language_rows(60), language_rows(8, seed=1))
