"""A damaged note of how much was sent to MLflow."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.tracking.spool import Spool
from steadytrain.components.shared.workspace import Workspace


@pytest.mark.parametrize(
    "note", [b"", b"{", b"\xff\xfe", b"[1]", b'{"a.jsonl": "x"}', b'{"a.jsonl": -4}']
)
def test_damaged_note_starts_over(tmp_path, note):
    workspace = Workspace(tmp_path, "tiny")
    stream = workspace.stream("a")
    stream.emit(Warned(stage="train", message="so"))
    stream.close()
    path = workspace.tracking / "parent" / "told"
    path.parent.mkdir(parents=True)
    path.write_bytes(note)
    for count in (1, 0):
        with Spool(workspace, "parent").batch(lambda _: True) as events:
            assert len(events) == count
