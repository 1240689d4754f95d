"""How much was sent to MLflow, also after its note was damaged, and what waits."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.tracking.notes import RUN, Spool, remember, waiting
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


def test_what_waits_is_what_no_batch_has_taken(tmp_path):
    workspace = Workspace(tmp_path, "tiny")
    assert waiting(workspace) == (0, 0.0)
    stream = workspace.stream("a")
    for time in (1_700_000_000.0, 1_700_000_060.0):
        stream.emit(Warned(time=time, stage="train", message="so"))
    size = (workspace.events / "a.jsonl").stat().st_size
    # Before there is an MLflow run, everything waits.
    assert waiting(workspace) == (size, 1_700_000_000.0)
    remember(workspace, RUN, "parent")
    with Spool(workspace, "parent").batch(lambda _: True):
        assert waiting(workspace) == (size, 1_700_000_000.0)
    assert waiting(workspace) == (0, 0.0)
    stream.emit(Warned(time=1_700_000_090.0, stage="train", message="so"))
    stream.close()
    assert waiting(workspace) == (size // 2, 1_700_000_090.0)
