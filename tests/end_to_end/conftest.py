"""The command, in a folder of its own."""

from __future__ import annotations

import pytest

from support.command import Command


@pytest.fixture
def steadytrain(tmp_path):
    return Command(tmp_path / "output")


@pytest.fixture(scope="module")
def shared_steadytrain(tmp_path_factory):
    return Command(tmp_path_factory.mktemp("shared") / "output")
