"""Evaluation when memory runs out: smaller batches, and no landscape. torch's allocator raises."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import BatchSplit, StepFailed, Warned
from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.shared.workspace import Workspace

from support.forked import on_ranks
from support.short_evaluation import Measured, attack, evaluate

SPARE = 300_000_000


@pytest.mark.slow
def test_scores_under_attack_come_from_smaller_batches(tmp_path):
    on_ranks(1, attack, tmp_path, SPARE)
    found = Measured.load(tmp_path / "measured.json")
    assert found.told == [("scoring the candidate with evaluation.attack", 4, 8)]
    assert found.short == pytest.approx(found.plenty, rel=1e-5)


@pytest.mark.slow
def test_evaluation_ends_without_a_landscape_that_does_not_fit(tmp_path):
    on_ranks(1, evaluate, tmp_path, "run")
    short = EvaluationRecord.load(tmp_path / "short-evaluate.json")
    assert short.landscape is None
    assert "DefaultCPUAllocator" in short.landscape_missing
    assert "on a device with more memory" in short.landscape_missing
    for page in ("short-evaluation.html", "short-report.html"):
        assert "evaluation.landscape was not measured" in (tmp_path / page).read_text()
    workspace = Workspace(tmp_path, "run")
    events = read_events(workspace.events)
    assert short.landscape_missing in [e.message for e in events if isinstance(e, Warned)]
    assert not [e for e in events if isinstance(e, StepFailed | BatchSplit)]
    # With enough memory, the step measures it, and the scores are the same.
    again = EvaluationRecord.load(workspace.record("evaluate"))
    assert again.landscape is not None
    assert again.landscape_missing == ""
    assert again.metrics == short.metrics
