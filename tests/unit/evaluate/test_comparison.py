"""What prevents a comparison with the champion, and so its replacement."""

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.evaluate.bootstrap import Resampling
from steadytrain.components.evaluate.comparison import Candidate
from steadytrain.components.evaluate.measure import measure
from steadytrain.components.evaluate.scores import Scores
from steadytrain.components.shared.records import DataRecord, EvaluationRecord
from steadytrain.components.shared.registry.versions import (
    LABELS,
    SPLIT,
    TASK,
    Version,
    comparable_tags,
)

from support.evaluating import make_config

COUNT = 40


def table(loss=1.0, size=2, targets=1):
    return pa.table(
        {
            "id": [str(index) for index in range(COUNT)],
            "group": pa.nulls(COUNT, pa.string()),
            "slice": pa.nulls(COUNT, pa.string()),
            "loss": np.full(COUNT, loss) * (1 + np.arange(COUNT) / COUNT),
            "targets": np.full(COUNT, targets),
            "bytes": np.full(COUNT, size),
        }
    )


class Known:
    """A task whose champion has the scores that the test sets."""

    def __init__(self, scores):
        self.scores = scores
        self.scorer = self.packager = self

    def load_logged(self, model_uri):
        assert model_uri == "models:/shapes/7"
        return {"model": None}

    def score(self, components, records):
        if isinstance(self.scores, Exception):
            raise self.scores
        return self.scores


@pytest.fixture
def decide(tmp_path):
    config = make_config(tmp_path, "run")
    data = DataRecord(
        folder=str(tmp_path), fingerprint="f", task=config.data.task, sides={},
        test_records="test.arrow", split_digest="split",
    )  # fmt: skip

    def against(theirs, splits=(), first=False, **tags):
        mine = Scores.of(table(0.5))
        evaluation = EvaluationRecord(
            task="shapes",
            weights_digest="mine",
            examples=COUNT,
            metrics=measure(mine, Resampling(100, 0.9, 0)),
            scores="",
            splits=list(splits),
        )
        known = Known(theirs)
        records = pa.table({"id": range(COUNT)})
        candidate = Candidate(config, data, known, "mine", evaluation, records, mine)
        champion = Version("7", comparable_tags(config, data) | tags, "models:/shapes/7")
        told = []
        decision = candidate.against(None if first else champion, told.append)
        return decision, told

    return against


def test_comparable_champion_is_scored_again_and_beaten(decide):
    decision, told = decide(table(1.0))
    assert decision.promoted
    assert decision.improvement.value == pytest.approx(0.5)
    assert told == [COUNT]


@pytest.mark.parametrize("first", [False, True])
def test_model_whose_base_used_another_split_is_not_promoted(decide, first):
    assert decide(table(1.0), splits=["split"], first=first)[0].promoted
    decision, told = decide(table(1.0), splits=["another", "split"], first=first)
    assert not decision.promoted
    assert "(model.base) was trained on another split" in decision.reason
    assert decision.champion_version == (None if first else "7")
    assert told == []


def test_tokenizers_may_differ_if_the_bytes_are_equal(decide):
    decision, _ = decide(table(1.0, targets=3))
    assert decision.promoted


@pytest.mark.parametrize(
    ("theirs", "tags", "reason"),
    [
        (table(1.0), {TASK: "another"}, "is for another task"),
        (table(1.0), {SPLIT: "another"}, "it may have seen these records"),
        (table(1.0), {LABELS: "another"}, "has other labels"),
        (table(1.0, size=3), {}, "was scored on other spans"),
        (table(1.0).take(list(reversed(range(COUNT)))), {}, "was scored on other records"),
        (table(1.0, size=0), {}, "was scored on other spans"),
        (table(np.nan), {}, "has losses that are not finite"),
        (OSError("no such file\nand more"), {}, "cannot be loaded or scored: no such file"),
        (RuntimeError(), {}, "cannot be loaded or scored: RuntimeError"),
    ],
)
def test_unfair_comparison_is_not_promoted(decide, theirs, tags, reason):
    decision, _ = decide(theirs, **tags)
    assert not decision.promoted
    assert decision.reason.startswith("not promoted: bits per byte ")
    assert "the champion, version 7, " in decision.reason
    assert decision.reason.endswith(reason)
    assert decision.champion_version == "7"
    assert decision.improvement is None
