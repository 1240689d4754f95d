"""Small facts about a run, intact and damaged."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.tracking.notes import RUN, identity, recall, remember
from steadytrain.components.shared.workspace import Workspace


def test_stored_note_is_read_back(workspace: Workspace) -> None:
    assert recall(workspace, RUN) == ""
    remember(workspace, RUN, "0a1b")
    assert recall(workspace, RUN) == "0a1b"


def test_binary_note_is_ignored(workspace: Workspace) -> None:
    remember(workspace, RUN, "x")
    (workspace.tracking / RUN).write_bytes(b"\xff\xfe\0")
    assert recall(workspace, RUN) == ""


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"' OR 1", b"0a1b"])
def test_damaged_identity_is_replaced(workspace: Workspace, damage: bytes) -> None:
    first = identity(workspace)
    assert identity(workspace) == first
    (workspace.tracking / "identity").write_bytes(damage)
    second = identity(workspace)
    assert len(second) == 32
    assert second != first
    assert identity(workspace) == second
