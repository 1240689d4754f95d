"""What MLflow serves takes the frames that people have, or refuses them by name."""

from __future__ import annotations

import json
from datetime import date
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.tabular import scoring
from steadytrain.components.tabular.encoder import FEATURES
from steadytrain.components.tabular.scoring import TablePackager

from support.stores import copy_store
from support.tables import LINEAR, prepared


@pytest.fixture
def served(tmp_path, monkeypatch, empty_store):
    """Return a model as MLflow serves it, and a frame that it reads."""
    import mlflow

    chance = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "code": [f"{code:03d}" for code in chance.integers(0, 20, 200)],
            "size": chance.integers(0, 50, 200),
            "when": [f"2024-01-{day:02d}" for day in chance.integers(1, 28, 200)],
        }
    )
    frame["target"] = np.where(frame["size"] + frame["code"].astype(int) > 35, "big", "small")
    config, data = prepared(tmp_path, frame, *LINEAR)
    records = pa.table({FEATURES: [json.dumps(row) for row in frame.head(3).to_dict("records")]})
    learner = plugins.load(plugins.TRAINERS, "sklearn").learner(config, data)
    learner.learn([], learning_rate_scale=1.0)
    (tmp_path / "model").mkdir()
    learner.export(tmp_path / "model")
    mlflow.set_tracking_uri(copy_store(empty_store, tmp_path))
    # Records are parsed once, not for each column: with 20,000 columns, that took minutes.
    parse = Mock(wraps=scoring.parsed)
    monkeypatch.setattr(scoring, "parsed", parse)
    experiment = mlflow.create_experiment("test", artifact_location=(tmp_path / "a").as_uri())
    with mlflow.start_run(experiment_id=experiment):
        uri = TablePackager(config, data).log_model(
            tmp_path / "model", name="table", records=records, metadata={}
        )
    assert parse.call_count == 1
    yield mlflow.pyfunc.load_model(uri), frame.drop(columns="target").head(20)
    mlflow.set_tracking_uri(None)


@pytest.mark.slow
def test_frame_has_the_same_answers_in_other_types_or_is_refused(served):
    model, frame = served
    expected = model.predict(frame)
    assert expected["prediction"].nunique() == 2
    for same in (
        frame[["when", "size", "code"]].assign(extra=1),
        frame.set_index(frame["code"]),
        frame.assign(when=pd.to_datetime(frame["when"])),
        frame.assign(when=pd.to_datetime(frame["when"], utc=True)),
        frame.assign(when=[date.fromisoformat(day) for day in frame["when"]]),
        frame.assign(size=frame["size"].astype("float32")),
        frame.assign(code=frame["code"].astype("category")),
        frame.convert_dtypes(dtype_backend="pyarrow"),
    ):
        pd.testing.assert_frame_equal(model.predict(same).reset_index(drop=True), expected)
    empty = model.predict(frame.head(0))
    assert (len(empty), [*empty]) == (0, [*expected])
    for wrong, named in (
        (frame.assign(code=frame["code"].astype(int)), "'code' of record 0"),
        (frame.drop(columns="size"), "no column 'size'"),
        (frame.to_numpy(), "no column 'code'"),
        (frame[[]], "no column 'code'"),
    ):
        with pytest.raises(ValueError, match=named):
            model.predict(wrong)
