"""What prevents a comparison with the champion, and so its replacement."""

import errno
import json
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import requests
import torch
from mlflow.exceptions import MlflowException

from steadytrain.components.evaluate import comparison
from steadytrain.components.evaluate.bootstrap import Resampling
from steadytrain.components.evaluate.comparison import Candidate, ChampionAway
from steadytrain.components.evaluate.metric import Scores, measure, point_values
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.records import DataRecord, EvaluationRecord
from steadytrain.components.shared.registry import (
    LABELS,
    LEARNED_UNTIL,
    SPLIT,
    TASK,
    Version,
    comparable_tags,
)
from steadytrain.components.shared.retry import retry

from support.evaluating import make_config, write_records

COUNT = 40


def table(loss=1.0, size=2, targets=1):
    return pa.table(
        {
            "id": [str(index) for index in range(COUNT)],
            "group": pa.nulls(COUNT, pa.string()),
            "slice": pa.nulls(COUNT, pa.string()),
            "loss": np.full(COUNT, loss) * (1 + np.arange(COUNT) / COUNT) * np.sign(targets),
            "targets": np.full(COUNT, targets),
            "bytes": np.full(COUNT, size),
        }
    )


class Known:
    """A task whose champion has the scores that the test sets."""

    is_compared_with_base = False

    def __init__(self, scores, base=None):
        self.scores, self.base = scores, base
        self.scorer = self

    @property
    def packager(self):
        return self

    def load_base(self):
        if isinstance(self.base, Exception):
            raise self.base
        return {"model": "base"}

    def load_logged(self, model_uri):
        assert model_uri == "models:/shapes/7"
        return {"model": None}

    def score(self, components, records):
        if components["model"] == "base":
            return self.base
        if isinstance(self.scores, list):
            self.scores, raised = self.scores[-1], self.scores[0]
            raise raised
        if isinstance(self.scores, Exception):
            raise self.scores
        return self.scores


@pytest.fixture
def decide(tmp_path):
    plain = make_config(tmp_path, "run")
    (tmp_path / "base").mkdir()
    based = make_config(tmp_path, "run", model={"base": str(tmp_path / "base")})
    write_records(tmp_path / "test.arrow", pa.table({"id": list(map(str, range(COUNT)))}))
    data = DataRecord(
        folder=str(tmp_path), fingerprint="f", task=plain.data.task, sides={},
        test_records="test.arrow", split_digest="split",
    )  # fmt: skip

    def against(
        theirs,
        splits=(),
        first=False,
        base=None,
        baseline=None,
        gate=None,
        mine=None,
        tested_from=None,
        **tags,
    ):
        mine_data = data.model_copy(update={"tested_from": tested_from})
        config = plain if base is None else based
        config = config.model_copy(update={"gate": config.gate.model_copy(update=gate)})
        mine = Scores.of(table(0.5) if mine is None else mine)
        naive = None if baseline is None else Scores.of(baseline)
        evaluation = EvaluationRecord(
            task="shapes",
            weights_digest="mine",
            examples=COUNT,
            metrics=measure(mine, Resampling(100, 0.9, 0)),
            scores="",
            splits=list(splits),
            baselines={} if baseline is None else point_values(Scores.of(baseline)),
        )
        known = Known(theirs, base)
        records = pa.table({"id": range(COUNT)})
        candidate = Candidate(config, mine_data, known, "mine", evaluation, records, mine, naive)
        champion = Version("7", comparable_tags(config, data) | tags, "models:/shapes/7")
        told = []
        decision = candidate.against(None if first else champion, told.append, earlier=0)
        return decision, told

    return against


def test_comparable_champion_is_scored_again_and_beaten(decide):
    decision, told = decide(table(1.0))
    assert decision.promoted
    assert decision.improvement.value == pytest.approx(0.5)
    assert told == [COUNT]


def test_first_model_from_scratch_is_decided_without_its_packager(decide, monkeypatch):
    """It imports torch, which a finished run that is started again does not need."""
    monkeypatch.delattr(Known, "packager")
    assert decide(table(1.0), first=True)[0].promoted


@pytest.mark.parametrize(
    ("until", "tested", "fair"),
    [
        (["date", "2024-05-31T00:00:00"], ("date", "2024-06-01T00:00:00"), True),
        (["date", "2024-06-01T00:00:00"], ("date", "2024-06-01T00:00:00"), False),
        (["number", 9], ("number", 10.0), True),
        (["number", 10.5], ("number", 10.0), False),
        (["zoned", "2024-05-31T00:00:00"], ("date", "2024-06-01T00:00:00"), False),
        (["date", 3], ("date", "2024-06-01T00:00:00"), False),
        (["date", "2024-05-31T00:00:00"], None, False),
        (None, ("number", 10.0), False),
        ("date", ("date", "2024-06-01T00:00:00"), False),
    ],
)
def test_champion_of_an_earlier_time_is_compared_on_records_that_came_after_it(
    decide, until, tested, fair
):
    tags = {SPLIT: "another"} | ({LEARNED_UNTIL: json.dumps(until)} if until else {})
    decision, _ = decide(table(1.0), tested_from=tested, **tags)
    assert decision.promoted is fair
    assert ("it may have seen these records" in decision.reason) is not fair


@pytest.mark.parametrize("first", [False, True])
def test_model_whose_base_used_another_split_is_not_promoted(decide, first):
    assert decide(table(1.0), splits=["split"], first=first)[0].promoted
    decision, told = decide(table(1.0), splits=["another", "split"], first=first)
    assert not decision.promoted
    assert "(model.base) was trained on another split" in decision.reason
    assert decision.champion_version == (None if first else "7")
    assert told == []


@pytest.mark.parametrize("first", [False, True])
def test_candidate_must_beat_the_naive_baseline_unless_that_is_off(decide, first):
    decision, _ = decide(table(1.0), first=first, baseline=table(0.01))
    assert not decision.promoted
    assert "not shown to be better than the naive baseline" in decision.reason
    decision, _ = decide(
        table(1.0), first=first, baseline=table(0.01), gate={"beat_baseline": False}
    )
    assert decision.promoted, decision.reason


@pytest.mark.parametrize("first", [False, True])
def test_what_makes_a_record_hard_for_the_baseline_too_does_not_count(decide, first):
    """Losses from 0.5 to 1.0 overlap with 0.55 to 1.1, but each one is a tenth lower."""
    decision, _ = decide(table(1.0), first=first, baseline=table(0.55))
    assert decision.promoted, decision.reason
    (found,) = decision.comparisons
    assert found.improvement.low == pytest.approx(1 - 0.5 / 0.55)


@pytest.mark.parametrize("first", [False, True])
def test_baseline_of_other_text_promotes_nothing(decide, first):
    decision, _ = decide(table(1.0), first=first, baseline=table(1.0, size=3))
    assert not decision.promoted
    assert "the naive baseline was scored on other spans" in decision.reason


@pytest.mark.parametrize("first", [False, True])
def test_candidate_must_beat_the_model_that_it_started_from(decide, first):
    decision, _ = decide(table(1.0), first=first, base=table(0.8))
    assert decision.promoted
    (found,) = decision.comparisons
    assert (found.what, found.metric, decision.base_not_compared) == (
        "model.base",
        "bits_per_byte",
        "",
    )
    assert found.improvement.value == pytest.approx(1 - 0.5 / 0.8)
    decision, _ = decide(table(1.0), first=first, base=table(0.4))
    assert not decision.promoted
    assert "it is not shown to be better than model.base: bits per byte" in decision.reason


@pytest.mark.parametrize("first", [False, True])
def test_training_that_changed_nothing_promotes_nothing(decide, first):
    decision, _ = decide(table(1.0), first=first, base=table(0.5))
    assert not decision.promoted
    assert "training changed nothing: on each test record its loss is that of" in decision.reason


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (BadInput("its labels are others", remedy="none"), "its labels are others"),
        (table(1.0, size=3), "model.base was scored on other spans"),
        (table(np.nan), "model.base has losses that are not finite"),
    ],
)
def test_base_that_the_task_cannot_score_is_no_rival_and_that_is_stated(decide, base, why):
    decision, _ = decide(table(1.0), base=base)
    assert decision.promoted
    assert decision.comparisons == []
    assert decision.base_not_compared == why


def test_base_that_is_gone_is_an_error(decide, tmp_path):
    (tmp_path / "base").rmdir()
    with pytest.raises(BadInput, match="no folder"):
        decide(table(1.0), base=table(0.8))


def test_test_side_with_one_record_to_predict_is_undecided(decide):
    one = (np.arange(COUNT) == 0).astype(int)
    decision, _ = decide(table(1.0, targets=1), first=True, mine=table(0.5, targets=one))
    assert decision.undecided
    assert "1 independent test examples are too few" in decision.reason


def test_tokenizers_may_differ_if_the_bytes_are_equal(decide):
    decision, _ = decide(table(1.0, targets=3))
    assert decision.promoted


@pytest.mark.parametrize(
    ("theirs", "tags", "reason"),
    [
        (table(1.0), {TASK: "another"}, "is for another task"),
        (table(1.0), {SPLIT: "another"}, "it may have seen these records"),
        (table(1.0), {LABELS: "another"}, "has them in another order (see data.labels)"),
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


SURROUNDINGS = [
    ConnectionError("Connection reset by peer"),
    requests.exceptions.ReadTimeout("Read timed out."),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.ENOSPC, "No space left on device"),
    MemoryError("Unable to allocate 2 GiB"),
    torch.OutOfMemoryError("CUDA out of memory."),
    StorageError("s3://bucket/model cannot be read"),
    MlflowException("API request failed with exception 503"),
]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(comparison, "retry", partial(retry, seconds=0.0))


@pytest.mark.parametrize("error", SURROUNDINGS, ids=lambda error: type(error).__name__)
def test_error_of_the_surroundings_is_no_decision(decide, impatient, error):
    with pytest.raises(ChampionAway, match="the champion, version 7, cannot be loaded"):
        decide(error)


def test_champion_is_tried_again(decide):
    decision, _ = decide([ConnectionError("Connection reset by peer"), table(1.0)])
    assert decision.promoted


@pytest.mark.parametrize("error", [KeyError("head"), ValueError("sizes"), EOFError("torn")])
def test_content_of_the_champion_is_a_decision(decide, error):
    decision, _ = decide(error)
    assert not decision.promoted
    assert "cannot be loaded or scored" in decision.reason
